"""Products of matrices, by the library that is the quicker one on this processor.

torch multiplies float32 matrices by MKL, which gives processors of other makers than Intel registers of half the width
that they have; oneDNN, which torch brings along for convolutions, uses them whole. Where that matters, large products
are oneDNN's: those of a model's linear layers on the way forward and back (`quick_linear_layers`), and our own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import linear

from steppe.fast.switch import fast_paths_enabled
from steppe.runtime.environment import processor_maker

_MAKERS = ("AuthenticAMD", "HygonGenuine")
"""Of processors that MKL holds back, as far as they have AVX-512."""
_LARGE = 2**22
"""Multiplications from which on a product is worth a call of oneDNN's, which is the dearer call."""
_SIDES = 4
"""Rows and columns that it must have at the least: with fewer, reading the matrices is all the work there is."""
_WIDE = 2**14
"""Elements of a weight from which on its layer is looked at."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """A B, of two matrices."""
    return _by_onednn(a, b.t()) if _is_for_onednn(a, b.t()) else torch.mm(a, b)


def less_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """T − A B."""
    return total - _by_onednn(a, b.t()) if _is_for_onednn(a, b.t()) else torch.addmm(total, a, b, alpha=-1)


def plus_product(total: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0, keep: float = 1.0, out: Tensor) -> None:
    """T times `keep` + A B times `scale`, written to `out`, which may be T itself; nothing is differentiated."""
    if not _is_for_onednn(a, b.t()):
        torch.addmm(total, a, b, beta=keep, alpha=scale, out=out)
        return
    smaller = a.numel() <= total.numel()  # which is the one to be multiplied by the number
    found = _by_onednn(a * scale, b.t()) if smaller else _by_onednn(a, b.t()).mul_(scale)
    if keep == 0:  # whatever T holds
        out.copy_(found)
    else:
        torch.add(found, total, alpha=keep, out=out)


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """X Wᵀ for few samples, by torch. On a CPU a few rows at a time: from 16 on, BLAS rearranges the whole of W first,
    which for as few as these costs more than everything else.
    """
    if 16 <= x.shape[0] <= 48 and weight.shape[1] >= 512 and x.device.type == "cpu":
        transposed = weight.t()
        size = 15 if x.shape[0] % 10 else 10
        return torch.cat([torch.mm(x[start : start + size], transposed) for start in range(0, x.shape[0], size)])
    return torch.mm(x, weight.t())


def wide_linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers of a model that may be worth it; none where they are not, or where the model is compiled."""
    modules = list(model.modules()) if fast_paths_enabled() and onednn_is_quicker() else []
    if any(type(module).__name__ == "OptimizedModule" or module._compiled_call_impl for module in modules):
        return []
    return [module for module in modules if type(module) is nn.Linear and module.weight.numel() >= _WIDE]


@contextmanager
def fast_linear_layers(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Inside, these layers multiply by the quicker library, and so will the way back through them. A layer with a
    forward of its own keeps it.
    """
    taken = [layer for layer in layers if type(layer) is nn.Linear and "forward" not in vars(layer)]
    for layer in taken:
        vars(layer)["forward"] = functools.partial(_forward, layer)
    try:
        yield
    finally:
        for layer in taken:
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """What torch's own forward of linear layers gives."""
    weight, bias = layer.weight, layer.bias
    if (
        torch.is_autocast_enabled("cpu")
        or not _is_plain(input)
        or input.ndim < 2
        or input.shape[-1] != weight.shape[1]
        or (bias is not None and not (_is_plain(bias) and bias.shape == weight.shape[:1]))
    ):
        return linear(input, weight, bias)
    rows = input.numel() // max(input.shape[-1], 1)
    if not _are_for_onednn(rows, weight.shape[1], weight.shape[0]) or not _is_plain(weight) or _is_watched():
        return linear(input, weight, bias)
    output = _by_onednn(input.flatten(0, -2), weight)
    if input.ndim > 2:  # no view, which operations in place would cut off from what is differentiated
        output = torch.ops.aten._unsafe_view(output, [*input.shape[:-1], weight.shape[0]])
    return output if bias is None else output + bias


@functools.cache
def onednn_is_quicker() -> bool:
    """Whether MKL leaves half of this processor unused, oneDNN does not, and torch has all that it takes."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processor_maker() in _MAKERS
        and _onednn_product() is not None
        and _saving_hooks() is not None
    )


@functools.cache
def _onednn_product() -> Callable[..., Tensor] | None:
    """The way to oneDNN for dense float32 matrices; it is torch's own affair, so some version may lack it."""
    found: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found


@functools.cache
def _saving_hooks() -> Callable[[bool], object] | None:
    """The way to what sees to tensors that are saved for the way back; versions before 2.8 have none."""
    found: Callable[[bool], object] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return found


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether A Bᵀ is."""
    return _are_for_onednn(a.shape[0], a.shape[1], b.shape[0]) and _is_plain(a) and _is_plain(b) and not _is_watched()


def _are_for_onednn(rows: int, inner: int, columns: int) -> bool:
    """Whether products of this size are."""
    large = rows * inner * columns >= _LARGE and min(rows, columns) >= _SIDES
    return large and onednn_is_quicker() and fast_paths_enabled()


def _is_plain(x: Tensor) -> bool:
    """Whether it is float32 in the processor's memory, in rows and columns, and no stand-in of anything."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not x.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def _is_watched() -> bool:
    """Whether somebody else sees to what is computed, or would see it come otherwise than from torch's own functions:
    transforms, forward derivatives, modes, and hooks on what is saved for the way back (checkpoints compute it anew,
    out of our sight); or whether oneDNN is switched off.
    """
    saving = _saving_hooks()
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or (saving is not None and saving(True) is not None)
        or not torch._C._get_mkldnn_enabled()
    )


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    """A Bᵀ."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        output: Tensor = _Product.apply(a, b, _Second.apply(b, a.detach()))  # type: ignore[no-untyped-call]
        return output
    multiply = _onednn_product()
    assert multiply is not None
    # A second matrix whose rows or columns do not lie one after another would be multiplied number by number.
    dense = b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()
    return multiply(a, dense, None, "none", [], "")


class _Product(torch.autograd.Function):
    """A Bᵀ, whose derivatives are such products again: G B and Gᵀ A.

    A node of the graph is run whole or not at all, and nobody asks for the gradient of a weight that is had as factors.
    So the second derivative is that of another node, to which this one hands G; but where it is to be differentiated
    again it is taken here, since that node does not know how A came about.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, second: Tensor) -> Tensor:
        needs_a, needs_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        return _by_onednn(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (g,), (a, b) = gradients, ctx.saved_tensors
        by_a = None if b is None else product(g, b)
        if torch.is_grad_enabled():
            return by_a, None if a is None else product(g.t(), a), None
        return by_a, None, g


class _Second(torch.autograd.Function):
    """What stands for B in the graph: a tensor of the product's shape, of which only the gradient G matters."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, a: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a)
        return b.new_empty(1).expand(a.shape[0], b.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (g,), (a,) = gradients, ctx.saved_tensors
        return None if g is None else product(g.t(), a), None
