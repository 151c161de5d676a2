"""A user's own images: a folder with one subfolder per class, a few classes per task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from steppe.benchmarks.image_benchmark import ImageBenchmark, Split, TaskSpec, random_subset, split_classes
from steppe.data import folder
from steppe.data.images import ImageSet
from steppe.data.task import Augmentation
from steppe.data.transforms import CropAndFlip, Normalize
from steppe.errors import UsageError
from steppe.models.alexnet import AlexNet
from steppe.models.four_conv import FourConv
from steppe.models.lenet import LeNet
from steppe.registry import register_benchmark
from steppe.runtime.files import expand_path
from steppe.settings import TrainingConfig, setting

_NETWORKS = {"lenet": LeNet, "alexnet": AlexNet, "four-conv": FourConv}


@register_benchmark("folder", "Your own images, folder:PATH: a few classes at a time.", argument="path")
@dataclass(frozen=True)
class ImageFolder(ImageBenchmark):
    """Settings of a benchmark made from a folder of images."""

    training = TrainingConfig(epochs=10, batch_size=32, patience=3)

    path: str = setting("", "the folder: PATH/train/CLASS and PATH/test/CLASS, or PATH/CLASS alone")
    classes_per_task: int = setting(
        2, "classes per task, in alphabetical order; classes left over are not used", at_least=1
    )
    tasks: int = setting(0, "number of tasks; 0: as many as there are classes for", at_least=0)
    size: int = setting(32, "pixels a side to which the images are scaled", at_least=16, at_most=512)
    test_share: float = setting(
        0.2, "fraction of each class held out for testing, without a test folder", above=0, below=1
    )
    valid_share: float = setting(0.1, "fraction of the training images held out for validation", above=0, below=1)
    augment: bool = setting(False, "crop and flip the training images")
    network_name: str = setting("lenet", "the network", choices=tuple(_NETWORKS))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path:  # a config file must work from any directory
            object.__setattr__(self, "path", str(expand_path(self.path).resolve()))

    @property
    def is_canonical(self) -> bool:
        """Always: there are no published results."""
        return True

    def images(self) -> ImageSet:
        """The images, scaled."""
        if not self.path:
            raise UsageError("the benchmark folder needs a path: folder:PATH, or --set benchmark.path=PATH.")
        return folder.load(Path(self.path), self.size, self.test_share)

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """The classes in alphabetical order."""
        names, each = self.images().classes, self.classes_per_task
        possible = len(names) // each
        if possible == 0 or self.tasks > possible:
            raise UsageError(
                f"{self.path} has {len(names)} classes, enough for {possible} task(s) of {each}; "
                "lower classes_per_task or tasks."
            )
        return split_classes(range(len(names)), self.tasks or possible, each, names)

    def split(self, seed: int) -> Split:
        """A random share of each task's training images for validation."""
        return random_subset(len(self.images().select("train")[1]), seed, held_out=self.valid_share)

    def augmentation(self) -> Augmentation | None:
        """Shifts by up to an eighth of the side, and horizontal flips."""
        return CropAndFlip(self.size // 8) if self.augment else None

    @property
    def input_transform(self) -> Normalize:
        """Pixels from −2 to 2."""
        return Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))

    def remarks(self) -> list[str]:
        """The classes that are left over."""
        names, specs = self.images().classes, self.task_specs(0)
        left = names[self.classes_per_task * len(specs) :]
        return [f"classes left over: {', '.join(left)}."] if left else []

    def network(self) -> nn.Module:
        """The chosen network, with an output for each class."""
        return _NETWORKS[self.network_name](len(self.images().classes), self.size)
