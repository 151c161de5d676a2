"""Dropout that is quick on a CPU, where torch's own draws one random number per element and so takes a third of the
time of AlexNet's passes: here sixteen bits of each draw decide about one element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import max_pool2d, relu

_LEVELS = 2**16


def dropout(x: Tensor, share: float, training: bool) -> Tensor:
    """In training, elements are dropped with the probability `share`, to within 2⁻¹⁷, and the rest scaled up; draws
    from torch's global generator, as dropout does.
    """
    if _left_to_torch(x, share, training):
        return functional.dropout(x, share, training)
    return x * _kept(x, share).mul_(_scale(share))


def dropout_pool_relu(x: Tensor, share: float, training: bool) -> Tensor:
    """The same, then pooling by twos, then ReLU.

    ReLU may as well come first, the bits are the same; here it has a quarter of the numbers.
    """
    if _left_to_torch(x, share, training):
        return relu(max_pool2d(functional.dropout(x, share, training), 2))
    output: Tensor = _DropoutPoolReLU.apply(x, share)  # type: ignore[no-untyped-call]
    return output


class _DropoutPoolReLU(torch.autograd.Function):
    """A pooled number above 0 was not dropped, so that the way back needs no mask: where the maximum was and how it was
    scaled is enough.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        pooled, places = max_pool2d(_kept(x, share).mul_(x), 2, return_indices=True)
        output: Tensor = pooled.clamp_(min=0).mul_(_scale(share))  # scaling keeps order: it may wait until here
        ctx.save_for_backward(x, output, places)
        ctx.scale = _scale(share)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, output, places = ctx.saved_tensors
        passed = gradients[0] * (output > 0).to(output.dtype).mul_(ctx.scale)
        back = torch.ops.aten.max_pool2d_with_indices_backward
        return back(passed, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places), None


def _left_to_torch(x: Tensor, share: float, training: bool) -> bool:
    """Whether sixteen bits have nothing to decide, or draws cannot be laid out as the elements are: only where the
    memory has no gaps any element may take any bits.
    """
    dense = x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    some = 0 < _dropped_levels(share) < _LEVELS
    return not training or not some or x.device.type != "cpu" or not dense


def _kept(x: Tensor, share: float) -> Tensor:
    """1 where an element is kept, 0 where it is dropped."""
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].as_strided(x.shape, x.stride())
    last = _dropped_levels(share) - _LEVELS // 2 - 1  # the highest that is dropped
    # Clamped to two neighbours: a comparison's answers take three times as long to become numbers.
    return bits.clamp_(last, last + 1).sub_(last).to(x.dtype)


def _scale(share: float) -> float:
    return _LEVELS / (_LEVELS - _dropped_levels(share))


def _dropped_levels(share: float) -> int:
    """How many of the values that sixteen bits have mean that an element is dropped."""
    return round(share * _LEVELS)
