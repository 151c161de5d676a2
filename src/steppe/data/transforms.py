"""What is done to stored pixels, a batch at a time and on their device: normalisation, and variation in training."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

_LEVELS = torch.tensor(255.0, device="cpu")  # to divide by a Python number costs twice as much


@dataclass(frozen=True)
class UnitRange:
    """Bytes become numbers from 0 to 1; everything else stays as it is."""

    elementwise: ClassVar[bool] = True
    """Every number is treated alike, wherever it is."""

    def __call__(self, x: Tensor) -> Tensor:
        """The samples as numbers."""
        return x.float().div_(_LEVELS) if x.dtype == torch.uint8 else x


@dataclass(frozen=True)
class Normalize:
    """Bytes become (x / 255 − mean) / std, channel by channel, (n, channels, height, width); with a single channel the
    shape of the rest does not matter.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def elementwise(self) -> bool:
        """Whether every pixel is treated alike, wherever it is."""
        return len(self.mean) == 1

    def __call__(self, x: Tensor) -> Tensor:
        """The pixels as numbers."""
        scale, shift = _constants(self, x.device)
        # On a CPU, convolutions over channels-last images take two thirds of the time.
        layout = torch.channels_last if x.ndim == 4 and x.device.type == "cpu" else torch.preserve_format
        return x.to(torch.float32, memory_format=layout, copy=True).mul_(scale).sub_(shift)


@functools.lru_cache(maxsize=64)
def _constants(normalise: Normalize, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 / (255 std) and mean / std, made once for a device: to bring numbers there is to wait for it."""
    shape = (-1, 1, 1) if len(normalise.mean) > 1 else (1,)
    scale = [1 / (255 * std) for std in normalise.std]
    shift = [mean / std for mean, std in zip(normalise.mean, normalise.std, strict=True)]
    with torch.inference_mode(False):
        made = [torch.tensor(values, dtype=torch.float32, device=device).reshape(shape) for values in (scale, shift)]
    return made[0], made[1]


@dataclass(frozen=True)
class CropAndFlip:
    """Each image shifted by up to `padding` pixels either way, black moving in, and mirrored half of the time."""

    padding: int

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """New variants of images, (n, channels, height, width)."""
        n, channels, height, width = x.shape
        reach = 2 * self.padding + 1
        top, left = torch.randint(reach, (2, n), generator=generator, device="cpu")
        mirrored = torch.randint(2, (n, 1), generator=generator, device="cpu").bool()
        down, across = torch.arange(height, device="cpu"), torch.arange(width, device="cpu")
        rows = (top[:, None] + down).to(x.device, non_blocking=True)
        columns = (left[:, None] + torch.where(mirrored, across.flip(0), across)).to(x.device, non_blocking=True)
        framed = pad(x, (self.padding,) * 4)
        which = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[None, :, None, None]
        return framed[which, channel, rows[:, None, :, None], columns[:, None, None, :]]
