"""Transforms of stored pixels, a batch at a time and on their device: normalization and augmentation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

_LEVELS = torch.tensor(255.0, device="cpu")  # dividing by a Python number costs twice as much


@dataclass(frozen=True)
class UnitRange:
    """Scales bytes to 0 … 1; other types stay unchanged."""

    elementwise: ClassVar[bool] = True
    """Whether every element is treated alike, wherever it is."""

    def __call__(self, x: Tensor) -> Tensor:
        """The scaled samples."""
        return x.float().div_(_LEVELS) if x.dtype == torch.uint8 else x


@dataclass(frozen=True)
class Normalize:
    """Turns bytes into (x / 255 − mean) / std per channel, (n, channels, height, width); with a single mean and std,
    samples may have any shape.

    Args:
        mean: The mean of each channel.
        std: The standard deviation of each channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def elementwise(self) -> bool:
        """Whether every pixel is treated alike, wherever it is."""
        return len(self.mean) == 1

    def __call__(self, x: Tensor) -> Tensor:
        """The normalized pixels."""
        scale, shift = _constants(self, x.device)
        # On a CPU, convolutions over channels-last images take two thirds of the time.
        layout = torch.channels_last if x.ndim == 4 and x.device.type == "cpu" else torch.preserve_format
        return x.to(torch.float32, memory_format=layout, copy=True).mul_(scale).sub_(shift)


@functools.lru_cache(maxsize=64)
def _constants(normalise: Normalize, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 / (255 std) and mean / std, made once per device: copying them there means waiting for it."""
    shape = (-1, 1, 1) if len(normalise.mean) > 1 else (1,)
    scale = [1 / (255 * std) for std in normalise.std]
    shift = [mean / std for mean, std in zip(normalise.mean, normalise.std, strict=True)]
    with torch.inference_mode(False):
        made = [torch.tensor(values, dtype=torch.float32, device=device).reshape(shape) for values in (scale, shift)]
    return made[0], made[1]


@dataclass(frozen=True)
class CropAndFlip:
    """Shifts each image by up to `padding` pixels either way, filling with black, and flips half of them."""

    padding: int

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Random variants of images, (n, channels, height, width)."""
        n, channels, height, width = x.shape
        reach = 2 * self.padding + 1
        top, left = torch.randint(reach, (2, n), generator=generator, device="cpu")
        mirrored = torch.randint(2, (n, 1), generator=generator, device="cpu").bool()
        down, across = torch.arange(height, device="cpu"), torch.arange(width, device="cpu")
        rows = (top[:, None] + down).to(x.device, non_blocking=True)
        columns = (left[:, None] + torch.where(mirrored, across.flip(0), across)).to(x.device, non_blocking=True)
        padded = pad(x, (self.padding,) * 4)
        which = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[None, :, None, None]
        return padded[which, channel, rows[:, None, :, None], columns[:, None, None, :]]
