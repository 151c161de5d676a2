"""TinyImageNet: forty tasks of five classes, in an order drawn by the seed; multi-head."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from steppe.benchmarks.image_benchmark import ImageBenchmark, Split, TaskSpec, holdout_per_class, split_classes
from steppe.data import tiny_imagenet
from steppe.data.images import ImageSet
from steppe.data.task import Augmentation
from steppe.data.transforms import CropAndFlip, Normalize
from steppe.errors import DataError
from steppe.models.four_conv import FourConv
from steppe.registry import register_benchmark
from steppe.settings import TrainingConfig, setting

_EACH, _CLASSES = 5, 200


@register_benchmark("tiny-imagenet", "TinyImageNet: 40 tasks of 5 classes each, every task with its own head.")
@dataclass(frozen=True)
class TinyImageNet(ImageBenchmark):
    """Settings of TinyImageNet: 2,250 training, 250 validation and 250 test images per task.

    With fewer of the 200 classes on disk there are fewer tasks.
    """

    training = TrainingConfig(epochs=10, batch_size=10)

    tasks: int = setting(40, "number of tasks, of five classes each", at_least=1, at_most=40)
    augment: bool = setting(True, "crop and flip the training images, as the released code does")

    def images(self) -> ImageSet:
        """TinyImageNet, or the classes of it that are on disk."""
        return tiny_imagenet.load()

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """Five classes per task, shuffled by the seed."""
        order = list(range(len(self.images().classes)))
        if len(order) < _EACH:
            raise DataError(
                f"TinyImageNet has {len(order)} classes on disk, and a task needs {_EACH}; run "
                "`steppe data fetch tiny-imagenet`."
            )
        random.Random(seed).shuffle(order)
        return split_classes(order, min(self.tasks, len(order) // _EACH), _EACH)

    def split(self, seed: int) -> Split:
        """50 images of each class are held out."""
        return holdout_per_class(50, seed)

    def augmentation(self) -> Augmentation | None:
        """Shifts by up to four pixels, and horizontal flips."""
        return CropAndFlip(4) if self.augment else None

    @property
    def input_transform(self) -> Normalize:
        """Standardized with the usual values for ImageNet."""
        return Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

    def remarks(self) -> list[str]:
        """How many classes are on disk, and whether training images are augmented."""
        varied = "are cropped and mirrored at random" if self.augment else "stay as they are"
        seen = f"training images {varied} (augment = {str(self.augment).lower()})."
        found = len(self.images().classes)
        if found == _CLASSES:
            return [seen]
        fewer = f", and {found // _EACH} tasks instead of {self.tasks}" if found // _EACH < self.tasks else ""
        return [f"{found} of {_CLASSES} classes are on disk: other tasks than those of the whole set{fewer}.", seen]

    def network(self) -> nn.Module:
        """The paper's network of four convolutions."""
        return FourConv()
