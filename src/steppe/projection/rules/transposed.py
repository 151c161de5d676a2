"""Transposed convolutions: convolutions of the input spread out by the stride, with the kernel reversed.

    y[q, o] = Σ_{c, t} W[c, o, t] x[(q + padding − dilation · t) / stride, c]

over all channels c and taps t for which the position is a whole number within the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from steppe.projection.rules.registry import Layout, register_call_rule


@register_call_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, layout=Layout.TRANSPOSED)
def transposed_convolution_patches(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """The rule of transposed convolutions: for every place of the output, what each channel and tap adds to it."""
    x, output_size = _arguments(*args, **kwargs)
    return {"weight": _patches(layer, x, output_size)}


def _arguments(input: Tensor, output_size: Sequence[int] | None = None) -> tuple[Tensor, Sequence[int] | None]:
    return input, output_size


def _patches(layer: nn.Module, x: Tensor, output_size: Sequence[int] | None) -> Tensor:
    assert isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    space = len(layer.kernel_size)
    x = x if x.ndim == space + 2 else x.unsqueeze(0)  # the batch dimension may be missing
    for axis, (size, step, gap) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        border, reach = int(layer.padding[axis]), gap * (size - 1)
        natural = (x.shape[2 + axis] - 1) * step - 2 * border + reach + 1
        length = natural + layer.output_padding[axis] if output_size is None else output_size[axis - space]
        x = x.movedim(2 + axis, -1)
        x = pad(x.unsqueeze(-1), (0, step - 1)).flatten(-2)[..., : (x.shape[-1] - 1) * step + 1]  # zeros in between
        x = pad(x, (reach - border, reach - border + length - natural)).movedim(-1, 2 + axis)
        x = x.unfold(2 + axis, reach + 1, 1)[..., ::gap].flip(-1)
    samples, channels = x.shape[:2]
    x = x.reshape(samples, layer.groups, channels // layer.groups, *x.shape[2:])
    # (samples, groups, channels, places..., taps...) -> (groups, samples, places..., channels, taps...)
    x = x.permute(1, 0, *range(3, 3 + space), 2, *range(3 + space, 3 + 2 * space))
    return x.reshape(layer.groups, -1, channels // layer.groups * math.prod(layer.kernel_size))
