"""Products by oneDNN against torch's own in float64, with first and second derivatives; and when it is not used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onednn_products import CLOSE, NEEDS_ONEDNN, every_product_by_onednn
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from steppe.fast import matmul as products
from steppe.fast.linear_hooks import may_factor
from steppe.fast.matmul import (
    fast_linear_layers,
    less_product,
    onednn_is_quicker,
    plus_product,
    product,
    wide_linear_layers,
)
from steppe.runtime import environment as machine
from steppe.runtime.environment import processor_maker

pytestmark = NEEDS_ONEDNN


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    return every_product_by_onednn(monkeypatch)


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def layer_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer with exactly these tensors."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


def quick(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A layer's output, as within a model."""
    layer = layer_of(weight, bias)
    with fast_linear_layers([layer]):
        output: Tensor = layer(x)
    return output


sizes = st.integers(1, 40)


@given(sizes, sizes, sizes, st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_products_equal_torchs(rows: int, inner: int, columns: int, turned: bool, turned_too: bool) -> None:
    a = matrix(inner, rows).t() if turned else matrix(rows, inner)
    b = matrix(columns, inner, 1).t() if turned_too else matrix(inner, columns, 1)
    total, exact = matrix(rows, columns, 2), a.double() @ b.double()
    torch.testing.assert_close(product(a, b).double(), exact, **CLOSE)
    torch.testing.assert_close(less_product(total, a, b).double(), total.double() - exact, **CLOSE)
    for place in (torch.empty(rows, columns), total.clone()):
        expected = 0.9 * total.double() + 0.3 * exact
        plus_product(total, a, b, scale=0.3, keep=0.9, out=place)
        torch.testing.assert_close(place.double(), expected, **CLOSE)
    itself = total.clone()
    plus_product(itself, a, b, scale=-2.0, keep=0.5, out=itself)
    torch.testing.assert_close(itself.double(), 0.5 * total.double() - 2 * exact, **CLOSE)
    nothing = torch.full_like(total, torch.nan)
    plus_product(nothing, a, b, scale=2.0, keep=0, out=nothing)
    torch.testing.assert_close(nothing.double(), 2 * exact, **CLOSE)


def test_matrices_with_gaps() -> None:
    """Slices of other matrices, and overlapping rows, are copied first."""
    a, b = matrix(6, 20)[:, 3:13], matrix(10, 30, 1)[:, ::3]
    torch.testing.assert_close(product(a, b), a.contiguous() @ b.contiguous(), **CLOSE)
    windows = torch.arange(15.0).unfold(0, 10, 1)
    torch.testing.assert_close(product(windows, windows.t()), windows.clone() @ windows.clone().t(), **CLOSE)


SHAPES = [(5, 7), (2, 3, 7), (2, 1, 2, 7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("learnt", ["both", "input", "weight"])
def test_linear_layers_and_their_two_derivatives(
    shape: tuple[int, ...], biased: bool, learnt: str, calls: list[object]
) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w, bias = (torch.randn(each, generator=generator) for each in (shape, (4, 7), (4,)))
    directions = [torch.randn(each.shape, generator=generator) for each in (x, w)]

    def derivatives(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        own, weight, shift = (each.to(dtype, copy=True) for each in (x, w, bias))
        wanted = {"both": [own, weight], "input": [own], "weight": [weight]}[learnt]
        for each in wanted:
            each.requires_grad_()
        output = call(own, weight, shift if biased else None)
        first = torch.autograd.grad(output.tanh().square().sum(), wanted, create_graph=True)
        along = torch.stack([(g * d.to(dtype)).sum() for g, d in zip(first, directions[-len(wanted) :], strict=True)])
        return [output, *first, *torch.autograd.grad(along.square().sum(), wanted)]

    if learnt == "input":
        directions = directions[:1]
    expected = derivatives(linear, torch.float64)
    assert not calls
    found = derivatives(quick, torch.float32)
    assert len(calls) >= 3  # forward, and at least one derivative and its own
    for each, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(each.double(), exact, **CLOSE)


def test_unneeded_products_are_not_computed(calls: list[tuple[int, ...]]) -> None:
    x, w = matrix(6, 5).requires_grad_(), matrix(3, 5, 1).requires_grad_()
    output = quick(x, w)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert calls == [(6, 5, 3), (6, 3, 5)]  # A Bᵀ; G B
    torch.autograd.grad(output.sum(), w, retain_graph=True)
    assert calls[2:] == [(6, 3, 5), (3, 6, 5)]  # G B belongs to the node that passes G on; Gᵀ A
    del calls[:]
    torch.autograd.grad(quick(x.detach(), w).sum(), w)
    assert calls == [(6, 5, 3), (3, 6, 5)]  # data need no gradient
    del calls[:]
    quick(x.detach(), w.detach())
    with torch.no_grad():
        quick(x, w)
    assert calls == [(6, 5, 3)] * 2


def test_several_backward_passes_through_one_graph() -> None:
    x, w = matrix(6, 5).requires_grad_(), matrix(3, 5, 1).requires_grad_()
    output = quick(x, w)
    once = torch.autograd.grad(output.sum(), w, retain_graph=True)[0]
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    again = torch.autograd.grad(output.sum(), w)[0]
    assert torch.equal(once, again)


def test_overwritten_inputs_are_detected() -> None:
    x, w = matrix(6, 5).requires_grad_(), matrix(3, 5, 1).requires_grad_()
    inner = x * 2
    output = quick(inner, w)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output.sum(), w)


def test_only_needed_tensors_are_saved() -> None:
    x, w = matrix(6, 5).requires_grad_(), matrix(3, 5, 1)
    inner = x * 2
    output = quick(inner, w)
    inner.add_(1)  # for a frozen weight, nothing depends on it any more
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], 2 * w.sum(0).expand(6, 5), **CLOSE)
    inner = x * 2
    seen, output = weakref.ref(inner), quick(inner, w)
    del inner
    gc.collect()
    assert seen() is None
    assert output.requires_grad


class Halved(TorchFunctionMode):
    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        assert callable(func)
        found = func(*args, **(kwargs or {}))
        return found / 2 if func is linear else found


class Own(Tensor):
    """A tensor subclass of the user's."""


def under_autocast(call: Callable[..., Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return call(matrix(4, 3), matrix(2, 3))


def within(context: object, call: Callable[..., Tensor]) -> Tensor:
    with context:  # type: ignore[attr-defined]
        return call(matrix(4, 3), matrix(2, 3))


def tangent(call: Callable[..., Tensor]) -> Tensor:
    with forward_ad.dual_level():
        output = call(forward_ad.make_dual(matrix(4, 3), matrix(4, 3, 1)), matrix(2, 3))
        return forward_ad.unpack_dual(output).tangent.clone()


def penalty_gradient(call: Callable[..., Tensor]) -> Tensor:
    """As large as a Jacobian computed in one vmap."""
    x, w = matrix(4, 3).requires_grad_(), matrix(2, 3, 1).requires_grad_()
    output = call(x, w).tanh()
    units = torch.eye(8).view(8, 4, 2)
    jacobian = torch.autograd.grad(output, x, units, is_grads_batched=True, create_graph=True)[0]
    return torch.autograd.grad(jacobian.square().sum(), w)[0]


NOT_FOR_IT: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "float64": lambda call: call(matrix(4, 3).double(), matrix(2, 3).double()),
    "bfloat16": lambda call: call(matrix(4, 3).bfloat16(), matrix(2, 3).bfloat16()),
    "a vector": lambda call: call(matrix(4, 3)[0], matrix(2, 3)),
    "no samples": lambda call: call(matrix(4, 3)[:0], matrix(2, 3)),
    "no features": lambda call: call(matrix(4, 3)[:, :0], matrix(2, 3)[:, :0]),
    "another device": lambda call: call(matrix(4, 3).to("meta"), matrix(2, 3).to("meta")),
    "a kind of tensors": lambda call: call(matrix(4, 3).as_subclass(Own), matrix(2, 3)),
    "sparse": lambda call: call(matrix(4, 3).to_sparse(), matrix(2, 3)),
    "nested": lambda call: torch.cat(call(torch.nested.nested_tensor([matrix(4, 3)]), matrix(2, 3)).unbind()),
    "autocast": under_autocast,
    "a mode": lambda call: within(Halved(), call),
    "a counter": lambda call: within(FlopCounterMode(display=False), call),
    "oneDNN switched off": lambda call: within(torch.backends.mkldnn.flags(enabled=False), call),
    "a transform": lambda call: torch.func.vmap(call)(matrix(8, 3).view(2, 4, 3), matrix(4, 3).view(2, 2, 3)),
    "beside a transform": lambda call: torch.func.vmap(lambda _: call(matrix(1, 3).repeat(4, 1), matrix(2, 3)))(
        torch.zeros(2)
    ),
    "a derivative by a transform": lambda call: torch.func.grad(lambda x: call(x, matrix(2, 3)).sum())(matrix(4, 3)),
    "a forward derivative": tangent,
}


@pytest.mark.filterwarnings(
    "ignore:.*nested tensors", "ignore:TF32", "ignore:`torch.jit.script`"
)  # all of them torch's own
@pytest.mark.parametrize("case", NOT_FOR_IT)
def test_unsupported_cases_use_torch(case: str, calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LARGE", 1)
    made = {
        size: matrix(*size) for size in ((4, 3), (2, 3), (8, 3), (1, 3))
    }  # random draws are not allowed in transforms
    monkeypatch.setitem(globals(), "matrix", lambda rows, columns, seed=0: made[rows, columns] + seed)
    expected = NOT_FOR_IT[case](linear)
    found = NOT_FOR_IT[case](quick)
    assert not calls
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if found.device.type == "cpu":
        assert torch.equal(found, expected)


def test_the_size_of_a_jacobian_taken_in_one_go() -> None:
    torch.testing.assert_close(penalty_gradient(quick), penalty_gradient(linear), **CLOSE)


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (matrix(4, 5), None),
        (matrix(4, 3), torch.zeros(2, dtype=torch.float64)),
        (matrix(4, 3), torch.zeros(4, 4, 2)),
    ],
)
def test_invalid_inputs_raise_torchs_errors(x: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(RuntimeError) as expected:
        linear(x, matrix(2, 3), bias)
    with pytest.raises(RuntimeError) as found:
        quick(x, matrix(2, 3), bias)
    assert str(found.value) == str(expected.value)


def test_small_and_narrow_products_use_torch(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, total = matrix(4, 5), matrix(5, 6, 1), matrix(4, 6, 2)
    for name, bound in (("_LARGE", 4 * 5 * 6 + 1), ("_SIDES", 5)):
        with monkeypatch.context() as patch:
            patch.setattr(products, name, bound)
            assert torch.equal(product(a, b), a @ b)
            assert torch.equal(less_product(total, a, b), torch.addmm(total, a, b, alpha=-1))
            plus_product(total, a, b, scale=2.0, keep=0.5, out=(found := torch.empty(4, 6)))
            assert torch.equal(found, torch.addmm(total, a, b, alpha=2, beta=0.5))
            assert torch.equal(quick(a, b.t()), linear(a, b.t()))
    assert not calls


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_which_layers_use_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_WIDE", 12)
    wide, narrow, own = nn.Linear(3, 4), nn.Linear(2, 4), Scaled(9, 9)
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: 3 * x  # type: ignore[method-assign]
    model = nn.Sequential(wide, narrow, own, patched, nn.Conv2d(4, 4, 3))
    assert wide_linear_layers(model) == [wide, patched]
    x = matrix(2, 4)
    with fast_linear_layers([wide, patched, own]):
        assert not may_factor(wide)
        assert torch.equal(patched(x), 3 * x)
        with fast_linear_layers([wide]):  # within a model of models
            pass
        assert not may_factor(wide)
    assert may_factor(wide)
    assert torch.equal(patched(x), 3 * x)
    with pytest.raises(ValueError, match="own"), fast_linear_layers([wide]):
        raise ValueError("own")
    assert may_factor(wide)


def test_compiled_models_use_torch() -> None:
    assert wide_linear_layers(torch.compile(nn.Linear(200, 200), backend="eager")) == []  # type: ignore[arg-type]
    whole = nn.Sequential(nn.Linear(200, 200))
    assert len(wide_linear_layers(whole)) == 1
    whole.compile(backend="eager")
    assert wide_linear_layers(whole) == []


@pytest.mark.parametrize(
    ("maker", "capability", "quicker"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
        ("x86_64", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_which_processors_use_onednn(
    maker: str, capability: str, quicker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "processor_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert onednn_is_quicker.__wrapped__() is quicker
    for lacking in ("_onednn_product", "_saving_hooks"):
        with monkeypatch.context() as patch:
            patch.setattr(products, lacking, lambda: None)
            assert not onednn_is_quicker.__wrapped__()


def test_other_processors_use_torch(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)
    assert wide_linear_layers(nn.Sequential(nn.Linear(200, 200))) == []
    quick(matrix(4, 3), matrix(2, 3))
    product(matrix(4, 3), matrix(3, 2))
    assert not calls


def test_processor_vendor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", told)
    monkeypatch.setattr("platform.processor", lambda: "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD")
    assert processor_maker() == "AuthenticAMD"  # as on Windows
    told.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: X\n")
    assert processor_maker() == "GenuineIntel"
    told.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    monkeypatch.setattr("platform.processor", lambda: "")
    assert processor_maker() == ""
