"""Split MNIST: the ten digits, two per task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from steppe.benchmarks.image_benchmark import TaskSpec, scenario_remarks, scenario_setting, split_classes
from steppe.benchmarks.mnist_benchmark import MNISTBenchmark
from steppe.models.mlp import MLP
from steppe.registry import register_benchmark
from steppe.settings import TrainingConfig, setting


@register_benchmark("split-mnist", "Split MNIST: 5 tasks of two digits each; task-, domain- or class-incremental.")
@dataclass(frozen=True)
class SplitMNIST(MNISTBenchmark):
    """Settings of Split MNIST."""

    training = TrainingConfig(epochs=1, batch_size=10)

    tasks: int = setting(5, "number of tasks, of two digits each", at_least=1, at_most=5)
    samples: int = setting(12_000, "training samples of each task, at most", at_least=1)
    scenario: str = scenario_setting()

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """0 and 1, 2 and 3, and so on."""
        return split_classes(range(10), self.tasks, 2, scenario=self.scenario)

    def network(self) -> nn.Module:
        """The paper's MLP, with ten outputs, of which each task has two, or with two, which all tasks share."""
        return MLP() if self.scenario == "task" else MLP(outputs=2)

    @property
    def growing_head(self) -> str | None:
        """The output layer, if each sample is predicted among all classes seen so far."""
        return "head" if self.scenario == "class" else None

    def remarks(self) -> list[str]:
        """Which scenario it is, if not the usual one."""
        return scenario_remarks(self.scenario)
