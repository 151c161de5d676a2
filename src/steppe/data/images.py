"""Labelled images as the benchmarks use them: numbered classes, training and test images as bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from steppe.errors import DataError

Part = Literal["train", "test"]


class ImageSet(ABC):
    """Images as uint8, (n, …), with their labels; label i is the class named `classes[i]`."""

    classes: tuple[str, ...]

    @abstractmethod
    def select(self, part: Part, classes: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Images and their labels (int64).

        Args:
            part: "train" or "test".
            classes: The classes, whose images follow each other in this order; None: all images in their own order.
        """


class ImageArrays(ImageSet):
    """Images held in memory."""

    def __init__(
        self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], classes: Sequence[str], name: str
    ) -> None:
        self.classes = tuple(classes)
        self._parts = {"train": train, "test": test}
        for part, (x, y) in self._parts.items():
            if x.dtype != torch.uint8 or len(x) != len(y):
                raise DataError(
                    f"{name}: expected uint8 {part} images with labels, got {len(x)} {x.dtype} and {len(y)} labels."
                )
            if len(y) and (int(y.min()) < 0 or int(y.max()) >= len(self.classes)):
                raise DataError(f"{name}: the {part} labels go beyond the {len(self.classes)} classes.")

    def select(self, part: Part, classes: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        x, y = self._parts[part]
        if classes is None:
            return x, y
        picked = torch.cat([(y == label).nonzero().flatten() for label in classes])
        return x[picked], y[picked]
