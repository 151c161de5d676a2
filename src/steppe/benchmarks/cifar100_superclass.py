"""CIFAR-100 Superclass: twenty tasks, one superclass of five classes each, multi-head; LeNet.

The paper's results are for images scrambled by a wrong reshape. `reading="scrambled"` reproduces them; the default is
the true images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from steppe.benchmarks.image_benchmark import ImageBenchmark, Split, TaskSpec, holdout
from steppe.data import cifar100
from steppe.data.images import ImageArrays, ImageSet
from steppe.data.transforms import Normalize
from steppe.models.gpm_lenet import GPMLeNet
from steppe.models.lenet import LeNet
from steppe.registry import register_benchmark
from steppe.settings import TrainingConfig, setting

ORDERS = {
    "A": tuple(range(20)),
    "B": (15, 12, 5, 9, 7, 16, 18, 17, 1, 0, 3, 8, 11, 14, 10, 6, 2, 4, 13, 19),
    "C": (17, 1, 19, 18, 12, 7, 6, 0, 11, 15, 10, 5, 13, 3, 9, 16, 4, 14, 2, 8),
    "D": (11, 9, 6, 5, 12, 4, 0, 10, 13, 7, 14, 3, 15, 16, 8, 1, 2, 19, 18, 17),
    "E": (6, 14, 0, 11, 12, 17, 13, 4, 9, 1, 7, 19, 8, 10, 3, 15, 18, 5, 2, 16),
}


@register_benchmark(
    "cifar100-superclass", "CIFAR-100 Superclass: 20 tasks of the 5 classes of one superclass, each with its own head."
)
@dataclass(frozen=True)
class CIFAR100Superclass(ImageBenchmark):
    """Settings of CIFAR-100 Superclass: 2,375 training, 125 validation and 500 test images per task."""

    training = TrainingConfig(epochs=50, batch_size=64, patience=6, freeze_norms=True)

    tasks: int = setting(20, "number of tasks, of one superclass each", at_least=1, at_most=20)
    order: str = setting("A", "order of the superclasses", choices=tuple(ORDERS))
    reading: str = setting(
        "true",
        "the true images, or the released code's wrong reading of their pixels",
        choices=("true", "scrambled"),
    )
    norm: str = setting(
        "batch",
        "the LeNet's normalization: BatchNorm (paper) or local response (GPM's own code)",
        choices=("batch", "response"),
    )

    def images(self) -> ImageSet:
        """CIFAR-100, true or scrambled."""
        images = cifar100.load()
        if self.reading == "true":
            return images
        (train_x, train_y), (test_x, test_y) = images.select("train"), images.select("test")
        train, test = (cifar100.scramble(train_x), train_y), (cifar100.scramble(test_x), test_y)
        return ImageArrays(train, test, images.classes, "CIFAR-100, scrambled")

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """The superclasses in order; each one's head is the same in every order."""
        specs = []
        for number in ORDERS[self.order][: self.tasks]:
            superclass = cifar100.SUPERCLASSES[number]
            specs.append(
                TaskSpec(superclass.name.replace("_", " "), superclass.classes, range(5 * number, 5 * number + 5))
            )
        return specs

    def split(self, seed: int) -> Split:
        """125 validation images per task."""
        return holdout(125, seed)

    @property
    def input_transform(self) -> Normalize:
        """Pixels from 0 to 1, not standardized."""
        return Normalize(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

    @property
    def is_canonical(self) -> bool:
        """Always, for both readings; the remarks say which one the published results are for."""
        return self.replace(reading="true") == type(self)()

    def remarks(self) -> list[str]:
        """Whether these are the paper's images."""
        if self.reading == "true":
            return ["the published figures were taken on scrambled images; these are the true ones, which are easier."]
        return ["the images are scrambled as in the released code, for comparison only."]

    def network(self) -> nn.Module:
        """The paper's LeNet, or that of GPM's code."""
        return LeNet() if self.norm == "batch" else GPMLeNet()
