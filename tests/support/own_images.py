"""Small image sets whose pixels identify each image."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.data.images import ImageArrays

CLASSES, EACH, TESTS = 100, 10, 2


def synthetic(classes: int = CLASSES, shape: tuple[int, ...] = (3, 32, 32), each: int = EACH) -> ImageArrays:
    """Each image's first pixel is its class, the second its number, and the third its part."""

    def part(count: int, marker: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(classes).repeat(count)  # classes mixed
        x = torch.zeros(len(y), *shape, dtype=torch.uint8)
        flat = x.view(len(y), -1)
        flat[:, 0], flat[:, 1], flat[:, 2] = (
            y.to(torch.uint8),
            torch.arange(len(y)).div(classes).to(torch.uint8),
            marker,
        )
        return x, y

    return ImageArrays(part(each, 0), part(TESTS, 1), [f"class {c}" for c in range(classes)], "synthetic")
