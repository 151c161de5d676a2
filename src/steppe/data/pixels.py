"""What is done to stored pixels, a batch at a time and on their device: normalisation, and variation in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Normalise:
    """Bytes become (x / 255 − mean) / std, channel by channel, (n, channels, height, width); with a single channel the
    shape of the rest does not matter.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """The pixels as numbers."""
        shape = (-1, 1, 1) if len(self.mean) > 1 else (1,)
        scale = torch.tensor([1 / (255 * std) for std in self.std], device=x.device).reshape(shape)
        shift = torch.tensor([mean / std for mean, std in zip(self.mean, self.std, strict=True)], device=x.device)
        # On a CPU, convolutions over channels-last images take two thirds of the time.
        layout = torch.channels_last if x.ndim == 4 and x.device.type == "cpu" else torch.preserve_format
        return x.to(torch.float32, memory_format=layout, copy=True).mul_(scale).sub_(shift.reshape(shape))


@dataclass(frozen=True)
class CropAndFlip:
    """Each image shifted by up to `padding` pixels either way, black moving in, and mirrored half of the time."""

    padding: int

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """New variants of images, (n, channels, height, width)."""
        n, channels, height, width = x.shape
        reach = 2 * self.padding + 1
        top, left = torch.randint(reach, (2, n), generator=generator)
        mirrored = torch.randint(2, (n, 1), generator=generator).bool()
        rows = top[:, None] + torch.arange(height)
        columns = left[:, None] + torch.where(mirrored, torch.arange(width).flip(0), torch.arange(width))
        rows, columns = rows.to(x.device), columns.to(x.device)
        framed = pad(x, (self.padding,) * 4)
        which = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[None, :, None, None]
        return framed[which, channel, rows[:, None, :, None], columns[:, None, None, :]]
