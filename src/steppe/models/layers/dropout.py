"""Fast dropout on a CPU.

torch draws one random number per element, which takes a third of the time of AlexNet's passes. Here sixteen bits decide
about four elements, by a table of the possible outcomes.
"""

from __future__ import annotations

from functools import cache
from math import comb
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import max_pool2d, relu

from steppe.fast.switch import fast_paths_enabled

_LEVELS = 2**16
_TOGETHER = 4


def dropout(x: Tensor, share: float, training: bool) -> Tensor:
    """Apply dropout, drawing from torch's global generator like `torch.nn.functional.dropout`.

    Args:
        x: The input.
        share: The probability that an element is dropped. The exact probability may be off by 2⁻¹⁴; the other elements
            are scaled up by the exact one.
        training: Whether to drop anything.

    Returns:
        The output.
    """
    if _left_to_torch(x, share, training):
        return functional.dropout(x, share, training)
    return x * _kept(x, share).mul_(_scale(share))


def dropout_pool_relu(x: Tensor, share: float, training: bool) -> Tensor:
    """Apply dropout, 2 × 2 max pooling and ReLU.

    ReLU before pooling would give the same bits, but has four times as many elements to process.

    Args:
        x: The input.
        share: As in `dropout`.
        training: As in `dropout`.

    Returns:
        The output.
    """
    if _left_to_torch(x, share, training):
        return relu(max_pool2d(functional.dropout(x, share, training), 2))
    output: Tensor = _DropoutPoolReLU.apply(x, share)  # type: ignore[no-untyped-call]
    return output


class _DropoutPoolReLU(torch.autograd.Function):
    """A pooled number above 0 was not dropped, so the backward pass needs only the maximum's index and the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        pooled, places = max_pool2d(_kept(x, share).mul_(x), 2, return_indices=True)
        output: Tensor = pooled.clamp_(min=0).mul_(_scale(share))  # scaling keeps the order
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
    """Whether to use torch's own dropout.

    Returns:
        True if fast paths are off, nothing is random, the device is not the CPU, or the elements have gaps in memory,
        so that bits cannot be assigned to them.
    """
    dense = x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return not (training and fast_paths_enabled()) or x.device.type != "cpu" or not dense or not 0 < _share(share) < 1


def _kept(x: Tensor, share: float) -> Tensor:
    """A mask: 1 where an element is kept, 0 where it is dropped."""
    groups = -(-x.numel() // _TOGETHER)
    draws = torch.empty(-(-groups // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    places = draws.view(torch.uint16)[:groups].to(torch.int32)
    kept = _table(share).index_select(0, places).view(torch.uint8)
    return kept[: x.numel()].as_strided(x.shape, x.stride()).to(x.dtype)


def _scale(share: float) -> float:
    return 1 / (1 - _share(share))


@cache
def _share(share: float) -> float:
    """The exact probability that an element is dropped, by the table."""
    levels = enumerate(_levels(share))
    return sum(dropped * comb(_TOGETHER, dropped) * each for dropped, each in levels) / (_TOGETHER * _LEVELS)


@cache
@torch.inference_mode(False)
def _table(share: float) -> Tensor:
    """For each value of sixteen bits, four mask bytes packed into one int32."""
    ways = torch.cartesian_prod(*[torch.arange(2, dtype=torch.uint8, device="cpu")] * _TOGETHER)  # 1: dropped
    levels = torch.tensor(_levels(share), device="cpu")[ways.sum(1, dtype=torch.int64)]
    return (1 - ways).repeat_interleave(levels, 0).view(torch.int32).squeeze(1)


def _levels(share: float) -> list[int]:
    """How many values of sixteen bits drop exactly a given set of 0 to 4 elements, by the size of the set."""
    exact = [share**dropped * (1 - share) ** (_TOGETHER - dropped) for dropped in range(_TOGETHER + 1)]
    levels = [round(_LEVELS * chance) for chance in exact]
    rest = _LEVELS - sum(comb(_TOGETHER, dropped) * each for dropped, each in enumerate(levels))
    levels[0 if share <= 0.5 else _TOGETHER] += rest  # there is one such set, with the most values to spare
    return levels
