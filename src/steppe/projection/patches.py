"""Compute R Rᵀ of a convolution's patches without extracting the patches.

A patch is a stack of strips, one per row of the kernel, and vertically adjacent patches share all strips but one. With
Z_r the strips of image row r, as rows, and h patches in a column of the image, the block of kernel rows i and i + d is

    Σ_{r = i}^{i + h − 1} Z_rᵀ Z_{r+d}.

Blocks with the same d differ in a few image rows at the edges, and the middle is multiplied once for all of them. For a
3 × 3 kernel this takes a third of the multiplications and of the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from steppe.fast.switch import fast_paths_enabled
from steppe.projection.rules.convolution import padding


def patch_product(layer: nn.Module, x: Tensor) -> tuple[Tensor, int] | None:
    """Compute R Rᵀ for a call of a convolution.

    Args:
        layer: The layer.
        x: Its input, (n, channels, height, width).

    Returns:
        R Rᵀ, (groups, in, in), and the number of patches; None for layers to which this does not apply, or when fast
        paths are disabled.
    """
    if not fast_paths_enabled() or not isinstance(layer, nn.Conv2d):
        return None
    if layer.stride[0] != 1 or layer.dilation[0] != 1 or x.ndim != 4:
        return None
    x = pad(x, padding(layer), mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    height, width = layer.kernel_size
    windows = x.shape[2] - height + 1
    if windows < height:  # patches share too little
        return None
    gap = layer.dilation[1]
    strips = x.unfold(3, gap * (width - 1) + 1, layer.stride[1])[..., ::gap]
    count = len(x) * windows * strips.shape[3]
    # (samples, groups, channels, rows, places, taps) -> (groups, rows, samples · places, taps · channels)
    groups, channels = layer.groups, x.shape[1] // layer.groups
    strips = strips.reshape(len(x), groups, channels, *strips.shape[2:]).permute(1, 3, 0, 4, 5, 2)
    strips = strips.reshape(groups, x.shape[2], -1, width * channels)
    product = x.new_empty(groups, channels, height, width, channels, height, width)
    for distance in range(height):
        last = height - 1 - distance  # the last row of the kernel that has a partner at this distance
        middle = _over_rows(strips, last, windows, distance)
        before = [_over_rows(strips, row, row + 1, distance) for row in range(last)]
        after = [_over_rows(strips, windows + row, windows + row + 1, distance) for row in range(last)]
        for row in range(last + 1):
            block = middle
            for edge in (*before[row:], *after[:row]):
                block = block + edge
            block = block.view(groups, width, channels, width, channels)
            product[:, :, row, :, :, row + distance, :] = block.permute(0, 2, 1, 4, 3)
            product[:, :, row + distance, :, :, row, :] = block.permute(0, 4, 3, 2, 1)
    size = channels * height * width
    return product.view(groups, size, size), count


def _over_rows(strips: Tensor, start: int, stop: int, distance: int) -> Tensor:
    """Σ Z_rᵀ Z_{r+d} over r from `start` to before `stop`."""
    upper = strips[:, start:stop].flatten(1, 2)
    lower = strips[:, start + distance : stop + distance].flatten(1, 2)
    return torch.bmm(upper.mT, lower)
