"""What a benchmark is: a sequence of tasks, a network, a training protocol, all given by its settings and a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from steppe.data.task import Task
from steppe.runtime.rng import Streams, preserve_global_rng
from steppe.settings import Settings, TrainingConfig


class Benchmark(Settings, ABC):
    """Base of every benchmark's settings."""

    training: ClassVar[TrainingConfig] = TrainingConfig()
    """How its tasks are learnt, unless a command says otherwise."""

    @abstractmethod
    def stream(self, seed: int) -> Sequence[Task]:
        """The tasks in order. They depend on the benchmark's settings and the seed alone."""

    @abstractmethod
    def network(self) -> nn.Module:
        """A new network, its weights drawn from torch's global generator as its layers do."""

    def model(self, seed: int) -> nn.Module:
        """A new network whose weights depend on the seed alone."""
        with preserve_global_rng(seed=Streams(seed).derive_seed("model")):
            return self.network()

    @property
    def input_transform(self) -> Callable[[Tensor], Tensor] | None:
        """What turns stored inputs into the network's; None: bytes become numbers from 0 to 1."""
        return None

    @property
    def is_canonical(self) -> bool:
        """Whether these are the tasks that published figures were taken on, as far as settings tell."""
        return self == type(self)()

    def remarks(self) -> list[str]:
        """What a reader of the results must know about the tasks."""
        return []
