"""The base class of benchmarks: a sequence of tasks, a network and a training protocol, from settings and a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from steppe.data.task import Task
from steppe.runtime.rng import Streams, preserve_global_rng
from steppe.settings import Settings, TrainingConfig


class Benchmark(Settings, ABC):
    """Base class of benchmarks. A subclass is a frozen dataclass of settings."""

    training: ClassVar[TrainingConfig] = TrainingConfig()
    """How its tasks are trained by default."""

    @abstractmethod
    def stream(self, seed: int) -> Sequence[Task]:
        """The tasks in order, which depend on the settings and the seed only."""

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
