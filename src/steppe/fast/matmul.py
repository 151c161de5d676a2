"""Matrix products by the faster library for this processor.

For float32 products torch uses MKL, which uses only half the register width of processors that are not Intel's.
oneDNN, bundled with torch for convolutions, does not. Where that matters, large products use oneDNN: those of a model's
linear layers, forward and backward (`fast_linear_layers`), and our own.
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
"""Vendors of processors that MKL slows down, if they have AVX-512."""
_LARGE = 2**22
"""The fewest multiplications for which oneDNN pays off: calling it costs more."""
_SIDES = 4
"""The fewest rows and columns of a product for oneDNN: with fewer, time goes into reading the matrices."""
_WIDE = 2**14
"""The fewest elements of a weight whose layer may use oneDNN."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """A B, for two matrices."""
    return _by_onednn(a, b.t()) if _is_for_onednn(a, b.t()) else torch.mm(a, b)


def less_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """T − A B."""
    return total - _by_onednn(a, b.t()) if _is_for_onednn(a, b.t()) else torch.addmm(total, a, b, alpha=-1)


def plus_product(total: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0, keep: float = 1.0, out: Tensor) -> None:
    """Write keep · T + scale · A B to `out`, which may be T itself; without autograd."""
    if not _is_for_onednn(a, b.t()):
        torch.addmm(total, a, b, beta=keep, alpha=scale, out=out)
        return
    smaller = a.numel() <= total.numel()  # scale the smaller matrix
    result = _by_onednn(a * scale, b.t()) if smaller else _by_onednn(a, b.t()).mul_(scale)
    if keep == 0:  # T may hold NaN
        out.copy_(result)
    else:
        torch.add(result, total, alpha=keep, out=out)


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """X Wᵀ for few samples.

    On a CPU it is computed a few rows at a time: from 16 rows on, BLAS rearranges all of W first, which for so few rows
    costs more than the product.

    Args:
        x: X, (n, in).
        weight: W, (out, in).

    Returns:
        The product, (n, out).
    """
    if 16 <= x.shape[0] <= 48 and weight.shape[1] >= 512 and x.device.type == "cpu":
        transposed = weight.t()
        size = 15 if x.shape[0] % 10 else 10
        return torch.cat([torch.mm(x[start : start + size], transposed) for start in range(0, x.shape[0], size)])
    return torch.mm(x, weight.t())


def wide_linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model that may use oneDNN; none if it is not faster here or the model is compiled."""
    modules = list(model.modules()) if fast_paths_enabled() and onednn_is_quicker() else []
    if any(type(module).__name__ == "OptimizedModule" or module._compiled_call_impl for module in modules):
        return []
    return [module for module in modules if type(module) is nn.Linear and module.weight.numel() >= _WIDE]


@contextmanager
def fast_linear_layers(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Let these layers use oneDNN inside, and in the backward pass.

    Args:
        layers: Linear layers. One with a forward of its own keeps it.
    """
    changed = [layer for layer in layers if type(layer) is nn.Linear and "forward" not in vars(layer)]
    for layer in changed:
        vars(layer)["forward"] = functools.partial(_forward, layer)
    try:
        yield
    finally:
        for layer in changed:
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """What torch's own forward of linear layers computes."""
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
    if not _are_for_onednn(rows, weight.shape[1], weight.shape[0]) or not _is_plain(weight) or _is_intercepted():
        return linear(input, weight, bias)
    output = _by_onednn(input.flatten(0, -2), weight)
    if input.ndim > 2:  # not a view, which in-place operations would detach
        output = torch.ops.aten._unsafe_view(output, [*input.shape[:-1], weight.shape[0]])
    return output if bias is None else output + bias


@functools.cache
def onednn_is_quicker() -> bool:
    """Whether MKL slows down this processor, oneDNN does not, and torch provides what is needed here."""
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
    """OneDNN's product of dense float32 matrices; a private operator, which some versions of torch lack."""
    operator: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return operator


@functools.cache
def _saving_hooks() -> Callable[[bool], object] | None:
    """Private access to the hooks on saved tensors; versions before 2.8 have none."""
    getter: Callable[[bool], object] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return getter


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN should compute A Bᵀ."""
    return (
        _are_for_onednn(a.shape[0], a.shape[1], b.shape[0]) and _is_plain(a) and _is_plain(b) and not _is_intercepted()
    )


def _are_for_onednn(rows: int, inner: int, columns: int) -> bool:
    """Whether oneDNN should compute products of this size."""
    large = rows * inner * columns >= _LARGE and min(rows, columns) >= _SIDES
    return large and onednn_is_quicker() and fast_paths_enabled()


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is dense float32 in CPU memory, and no subclass or wrapper."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not x.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def _is_intercepted() -> bool:
    """Whether something intercepts torch's functions, and would miss our calls, or oneDNN is disabled.

    Returns:
        True under functional transforms, forward-mode derivatives, modes or hooks on saved tensors (checkpointing), and
        without oneDNN.
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
    # With a second matrix that is contiguous in neither layout, oneDNN falls back to a slow loop.
    dense = b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()
    return multiply(a, dense, None, "none", [], "")


class _Product(torch.autograd.Function):
    """A Bᵀ, whose derivatives are products again: G B and Gᵀ A.

    A node of the graph runs whole or not at all, but the gradient of a weight that stays factored is not needed. So
    another node computes Gᵀ A, to which this one hands G. For a second derivative it is computed here, since the other
    node does not know where A comes from.
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
    """Stands for B in the graph: a tensor of the product's shape, of which only the gradient G matters."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, a: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a)
        return b.new_empty(1).expand(a.shape[0], b.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (g,), (a,) = gradients, ctx.saved_tensors
        return None if g is None else product(g.t(), a), None
