"""CIFAR-100 Split: ten tasks of ten classes, in numerical order; AlexNet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from steppe.benchmarks.image_benchmark import (
    ImageBenchmark,
    Split,
    TaskSpec,
    holdout,
    scenario_remarks,
    scenario_setting,
    split_classes,
)
from steppe.data import cifar100
from steppe.data.images import ImageSet
from steppe.data.transforms import Normalize
from steppe.models.alexnet import AlexNet
from steppe.models.gpm_alexnet import GPMAlexNet
from steppe.registry import register_benchmark
from steppe.settings import TrainingConfig, setting


@register_benchmark(
    "cifar100-split", "CIFAR-100 Split: 10 tasks of 10 classes each; task-, domain- or class-incremental."
)
@dataclass(frozen=True)
class CIFAR100Split(ImageBenchmark):
    """Settings of CIFAR-100 Split: 4,750 training, 250 validation and 1,000 test images per task."""

    training = TrainingConfig(epochs=50, batch_size=64, patience=6)

    tasks: int = setting(10, "number of tasks, of ten classes each", at_least=1, at_most=10)
    norm: str = setting(
        "second",
        "where the AlexNet has BatchNorm: after its second layer (paper), or after every hidden layer and by each "
        "batch's own statistics, in tests too (GPM's own code)",
        choices=("second", "every"),
    )
    scenario: str = scenario_setting()

    def images(self) -> ImageSet:
        """CIFAR-100."""
        return cifar100.load()

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """Classes 0 to 9, 10 to 19, and so on."""
        return split_classes(range(100), self.tasks, 10, scenario=self.scenario)

    def split(self, seed: int) -> Split:
        """250 validation images per task."""
        return holdout(250, seed)

    @property
    def shuffles_test_set(self) -> bool:
        """If test batches are normalized by their own statistics."""
        return self.norm == "every"

    @property
    def input_transform(self) -> Normalize:
        """Standardized with the usual values for CIFAR."""
        return Normalize(
            mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
            std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
        )

    def network(self) -> nn.Module:
        """The paper's AlexNet, or that of GPM's code."""
        outputs = 100 if self.scenario == "task" else 10
        return AlexNet(outputs) if self.norm == "second" else GPMAlexNet(outputs)

    @property
    def growing_head(self) -> str | None:
        """The output layer, if each sample is predicted among all classes seen so far."""
        return "head" if self.scenario == "class" else None

    def remarks(self) -> list[str]:
        """Which scenario it is, if not the usual one."""
        return scenario_remarks(self.scenario)
