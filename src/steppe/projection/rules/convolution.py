"""Convolutions: the input vectors are patches."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import pad

from steppe.projection.rules.registry import register_rule


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution_patches(layer: nn.Module, x: Tensor) -> Tensor:
    """The rule of convolutions: all patches, padding included, in the order of `weight.view(out, -1)`."""
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    space = len(layer.kernel_size)
    x = x if x.ndim == space + 2 else x.unsqueeze(0)  # the batch dimension may be missing
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = pad(x, padding(layer), mode=mode)
    for axis, (size, step, gap) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
    samples, channels = x.shape[:2]
    x = x.reshape(samples, layer.groups, channels // layer.groups, *x.shape[2:])
    # (samples, groups, channels, places..., taps...) -> (groups, samples, places..., channels, taps...)
    places = range(3, 3 + space)
    taps = range(3 + space, 3 + 2 * space)
    x = x.permute(1, 0, *places, 2, *taps)
    return x.reshape(layer.groups, -1, channels // layer.groups * math.prod(layer.kernel_size))


def padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """The padding before and after each axis, last axis first, as `torch.nn.functional.pad` expects it."""
    amounts: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            amounts += [total // 2, total - total // 2]
        elif layer.padding == "valid":
            amounts += [0, 0]
        else:
            amounts += [int(layer.padding[axis])] * 2
    return amounts
