"""The base class of benchmarks: a sequence of tasks, a network and a training protocol, from settings and a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from steppe.data.task import Task
from steppe.errors import UsageError
from steppe.runtime.rng import Streams, preserve_global_rng
from steppe.settings import Settings, TrainingConfig


class Benchmark(Settings, ABC):
    """Base class of benchmarks. A subclass is a frozen dataclass of settings."""

    training: ClassVar[TrainingConfig] = TrainingConfig()
    """How its tasks are trained by default."""

    @abstractmethod
    def stream(self, seed: int) -> Sequence[Task]:
        """The tasks in order, which depend on the settings and the seed only."""

    def validation_stream(self, seed: int) -> Sequence[Task]:
        """The same tasks with validation data in place of the test data, so that choices need not touch the latter.

        By default these are the data that the tasks hold out for validation.

        Args:
            seed: The seed of the run.

        Returns:
            The tasks.

        Raises:
            UsageError: A task holds out none.
        """
        return [_validate_on_held_out(task) for task in self.stream(seed)]

    @abstractmethod
    def network(self) -> nn.Module:
        """A new network, initialized from torch's global generator."""

    def model(self, seed: int) -> nn.Module:
        """A new network, whose weights depend on the seed only.

        Returns:
            The network.

        Example:
            >>> from steppe.benchmarks import PMNIST
            >>> sum(p.numel() for p in PMNIST().model(seed=0).parameters())
            89400
        """
        with preserve_global_rng(seed=Streams(seed).derive_seed("model")):
            return self.network()

    @property
    def input_transform(self) -> Callable[[Tensor], Tensor] | None:
        """Turns stored inputs into the network's; None scales bytes to 0 … 1."""
        return None

    @property
    def growing_head(self) -> str | None:
        """The name of the network's output layer, if it grows with the classes; see `steppe.Learner(grow=True)`."""
        return None

    @property
    def is_canonical(self) -> bool:
        """Whether the settings are those of the published results."""
        return self == type(self)()

    def remarks(self) -> list[str]:
        """Remarks about the tasks, which are shown with the results."""
        return []


def _validate_on_held_out(task: Task) -> Task:
    if task.val is None:
        raise UsageError(f"{task.name}: the benchmark has no validation data; report on test data.")
    return Task(task.train, task.val, val=task.val, head=task.head, augment=task.augment, name=task.name)
