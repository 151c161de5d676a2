"""Products of matrices, by the library that is the quicker one on this processor.

torch multiplies float32 matrices by MKL, which gives processors of other makers than Intel registers of half the width
that they have; oneDNN, which torch brings along for convolutions, uses them whole. Where that matters, large products
are oneDNN's: those of a model's linear layers on the way forward and back (`quick_linear_layers`), and our own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from steppe.machine import processor_maker

_LARGE = 2**22
"""Multiplications from which on a product is worth a call of oneDNN's, which is the dearer call."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """A B, of two matrices."""
    return _times_transposed(a, b.t()) if _is_for_onednn(a, b.t()) else torch.mm(a, b)


def less_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """T − A B."""
    if _is_for_onednn(a, b.t()):
        return total - _times_transposed(a, b.t())
    return torch.addmm(total, a, b, alpha=-1)


def plus_product(total: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0, keep: float = 1.0, out: Tensor) -> None:
    """T times `keep` + A B times `scale`, written to `out`, which may be T itself; nothing is differentiated."""
    if not _is_for_onednn(a, b.t()):
        torch.addmm(total, a, b, beta=keep, alpha=scale, out=out)
    elif a.numel() <= total.numel():  # the smaller matrix is multiplied by the number
        torch.add(_times_transposed(a * scale, b.t()), total, alpha=keep, out=out)
    else:
        torch.add(_times_transposed(a, b.t()).mul_(scale), total, alpha=keep, out=out)


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """X Wᵀ. On a CPU a few rows at a time: from 16 on, BLAS rearranges the whole of W first, which for as few as these
    costs more than everything else.
    """
    if 16 <= x.shape[0] <= 48 and weight.shape[1] >= 512 and x.device.type == "cpu":
        transposed = weight.t()
        size = 15 if x.shape[0] % 10 else 10
        return torch.cat([torch.mm(x[start : start + size], transposed) for start in range(0, x.shape[0], size)])
    return torch.mm(x, weight.t())


@contextmanager
def quick_linear_layers() -> Iterator[None]:
    """Inside, linear layers multiply by the quicker library, and so will the way back through them."""
    if not onednn_is_quicker():
        yield
        return
    with _QuickLinearLayers():
        yield


@functools.cache
def onednn_is_quicker() -> bool:
    """Whether MKL leaves half of this processor unused and oneDNN does not."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processor_maker() not in ("GenuineIntel", "")
        and _onednn_product() is not None
    )


@functools.cache
def _onednn_product() -> Callable[..., Tensor] | None:
    """The way to oneDNN for dense float32 matrices; it is torch's own affair, so some version may lack it."""
    found: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether A Bᵀ is."""
    return (
        a.shape[0] * a.shape[1] * b.shape[0] >= _LARGE
        and onednn_is_quicker()
        and all(type(each) in (Tensor, nn.Parameter) and _is_plain(each) for each in (a, b))
        # Somebody sees to what is saved for the way back, as checkpoints do: they compute it anew, out of our sight.
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def _is_plain(x: Tensor) -> bool:
    """Whether it is a matrix of float32 in the processor's memory, and no stand-in of a transform of functions."""
    return (
        x.dtype == torch.float32 and x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """A Bᵀ by oneDNN."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        seen: list[Tensor] = []
        output: Tensor = _Product.apply(a, b, _Second.apply(b, a.shape[0], seen), seen)  # type: ignore[no-untyped-call]
        return output
    multiply = _onednn_product()
    assert multiply is not None
    return multiply(a, b, None, "none", [], "")


class _Product(torch.autograd.Function):
    """A Bᵀ, whose derivatives are such products again: G B and Gᵀ A.

    A node of the graph is run whole or not at all, and nobody asks for the gradient of a weight that is had as factors.
    So the second derivative is that of another node, to which this one hands G and A.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, second: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.seen = seen
        return _times_transposed(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor, None]:
        (g,), (a, b) = gradients, ctx.saved_tensors
        ctx.seen[:] = [a]
        return _times_transposed(g, b.t()) if ctx.needs_input_grad[0] else None, None, g, None


class _Second(torch.autograd.Function):
    """What stands for B in the graph: a tensor of the product's shape, of which only the gradient matters."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, rows: int, seen: list[Tensor]) -> Tensor:
        ctx.seen = seen
        return b.new_empty(1).expand(rows, b.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (g,) = gradients
        return _times_transposed(g.t(), ctx.seen.pop().t()), None, None


class _QuickLinearLayers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _linear if func is linear and not torch.compiler.is_compiling() else func
        return call(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What torch's own function gives."""
    if weight.ndim != 2 or input.ndim < 2 or input.shape[-1] != weight.shape[1] or torch.is_autocast_enabled("cpu"):
        return linear(input, weight, bias)
    rows = input.flatten(0, -2)
    if not _is_for_onednn(rows, weight):
        return linear(input, weight, bias)
    output = _times_transposed(rows, weight).view(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias
