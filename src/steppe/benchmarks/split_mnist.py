"""Split MNIST: the ten digits, two per task; multi-head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steppe.benchmarks.image_benchmark import TaskSpec, split_classes
from steppe.benchmarks.mnist_benchmark import MNISTBenchmark
from steppe.registry import register_benchmark
from steppe.settings import TrainingConfig, setting


@register_benchmark("split-mnist", "Split MNIST: 5 tasks of two digits each, every task with its own head.")
@dataclass(frozen=True)
class SplitMNIST(MNISTBenchmark):
    """Settings of Split MNIST."""

    training = TrainingConfig(epochs=1, batch_size=10)

    tasks: int = setting(5, "number of tasks, of two digits each", at_least=1, at_most=5)
    samples: int = setting(12_000, "training samples of each task, at most", at_least=1)

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """0 and 1, 2 and 3, and so on; each task has two of the ten outputs."""
        return split_classes(range(10), self.tasks, 2)
