"""Products by oneDNN against torch's own in float64: differentiated once, twice, in models, and what is not for it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from steppe import products
from steppe.machine import processor_maker
from steppe.models.alexnet import AlexNet
from steppe.network import Network
from steppe.products import less_product, onednn_is_quicker, plus_product, product, quick_linear_layers
from steppe.projection.layers import covered_weights
from steppe.types import Batch, Outer, multiplied

pytestmark = pytest.mark.skipif(products._onednn_product() is None, reason="this build of torch has no way to oneDNN")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every product is for oneDNN, whatever the processor; the shapes of those that it did."""
    made: list[tuple[int, ...]] = []
    multiply = products._onednn_product()
    assert multiply is not None

    def counted(a: Tensor, b: Tensor, *rest: object) -> Tensor:
        made.append((a.shape[0], a.shape[1], b.shape[0]))
        return multiply(a, b, *rest)

    monkeypatch.setattr(products, "_LARGE", 0)
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: True)
    monkeypatch.setattr(products, "_onednn_product", lambda: counted)
    return made


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


sizes = st.integers(1, 40)


@given(sizes, sizes, sizes, st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_products_are_torch_s(rows: int, inner: int, columns: int, turned: bool, turned_too: bool) -> None:
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


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (2, 1, 2, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_layers_and_their_two_derivatives(shape: tuple[int, ...], biased: bool, calls: list[object]) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w, bias = (torch.randn(each, generator=generator) for each in (shape, (4, 7), (4,)))
    direction = [torch.randn(each.shape, generator=generator) for each in (x, w)]

    def derivatives(dtype: torch.dtype) -> list[Tensor]:
        own, weight, shift = (each.to(dtype).requires_grad_() for each in (x, w, bias))
        output = linear(own, weight, shift if biased else None)
        first = torch.autograd.grad(output.tanh().square().sum(), [own, weight], create_graph=True)
        along = sum((g * d.to(dtype)).sum() for g, d in zip(first, direction, strict=True))
        second = torch.autograd.grad(along, [own, weight, *([shift] if biased else [])])
        return [output, *first, *second]

    expected = derivatives(torch.float64)
    assert not calls
    with quick_linear_layers():
        found = derivatives(torch.float32)
    assert len(calls) >= 6  # forward, two derivatives, and those of each
    for each, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(each.double(), exact, **CLOSE)


def test_what_nobody_asks_for_is_not_multiplied(calls: list[tuple[int, ...]]) -> None:
    x, w = matrix(6, 5).requires_grad_(), matrix(3, 5, 1).requires_grad_()
    with quick_linear_layers():
        output = linear(x, w)
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        assert calls == [(6, 5, 3), (6, 3, 5)]  # A Bᵀ; G B
        torch.autograd.grad(output.sum(), w, retain_graph=True)
        assert calls[2:] == [(6, 3, 5), (3, 6, 5)]  # G B is of the node that hands G on; Gᵀ A
        del calls[:]
        output = linear(x.detach(), w)
        torch.autograd.grad(output.sum(), w)
        assert calls == [(6, 5, 3), (3, 6, 5)]  # data have no gradient
        del calls[:]
        linear(x.detach(), w.detach())
        with torch.no_grad():
            linear(x, w)
    assert calls == [(6, 5, 3)] * 2


def test_several_ways_back_through_one_graph() -> None:
    x, w = matrix(6, 5).requires_grad_(), matrix(3, 5, 1).requires_grad_()
    with quick_linear_layers():
        output = linear(x, w)
        once = torch.autograd.grad(output.sum(), w, retain_graph=True)[0]
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        again = torch.autograd.grad(output.sum(), w)[0]
    assert torch.equal(once, again)


def test_inputs_that_were_overwritten_are_noticed() -> None:
    x, w = matrix(6, 5).requires_grad_(), matrix(3, 5, 1).requires_grad_()
    with quick_linear_layers():
        inner = x * 2
        output = linear(inner, w)
        inner.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output.sum(), w)


def networks(model: nn.Module) -> tuple[Network, Network]:
    return Network(model), Network(copy.deepcopy(model).double())


class Checkpointed(nn.Module):
    """Its middle is computed once more on the way back, as torch's checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(lambda h: torch.tanh(self.middle(h)), self.first(x), use_reentrant=False)
        output: Tensor = self.last(hidden)
        return output


class Attentive(nn.Module):
    """Sequences, layers called twice, a fused projection, dropout that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.twice, self.head = nn.Linear(8, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unflatten(1, (3, 8))
        h = h + self.attention(h, h, h)[0]
        output: Tensor = self.head(torch.relu(self.twice(torch.relu(self.twice(h)))).mean(1))
        return output


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in place": (lambda: nn.Sequential(nn.Linear(7, 6), nn.ReLU(inplace=True), nn.Dropout(0), nn.Linear(6, 5)), (7,)),
    "norm": (lambda: nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 5)), (7,)),
    "checkpoint": (Checkpointed, (7,)),
    "attention": (Attentive, (24,)),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("factored", [False, True])
def test_gradients_of_models(kind: str, factored: bool, calls: list[object]) -> None:
    torch.manual_seed(5)
    make, shape = MODELS[kind]
    own, twin = networks(make())
    x = torch.randn(4, *shape)
    labels, tasks = torch.tensor([0, 1, 2, 4]), torch.zeros(4, dtype=torch.int64)
    found = {}
    for network, dtype in ((own, torch.float32), (twin, torch.float64)):
        network.open_head(None, 5)
        modules = network.model.named_modules() if factored else ()
        layers = {f"{place}.weight": [module] for place, module in modules if type(module) is nn.Linear}
        found[dtype] = network.gradient(Batch(x.to(dtype), labels, tasks), factored=layers)
    assert calls
    torch.testing.assert_close(found[torch.float32][0].double(), found[torch.float64][0], **CLOSE)
    for name, g in found[torch.float32][1].items():
        exact = found[torch.float64][1][name]
        assert isinstance(g, Outer) == isinstance(exact, Outer)
        torch.testing.assert_close(multiplied(g).double(), multiplied(exact), **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(own.outputs(x), own.model(x), **CLOSE)


def test_weights_had_as_factors_are_not_multiplied_on_the_way_back(calls: list[tuple[int, ...]]) -> None:
    network = Network(AlexNet(10, size=19))
    network.open_head(None, 10)
    batch = Batch(torch.randn(3, 3, 19, 19), torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64))
    covered = covered_weights(network.model)
    layers = {name: weight.layers for name, weight in covered.items() if name.startswith("hidden")}
    network.gradient(batch, factored=layers)
    forward = [(3, 256, 2048), (3, 2048, 2048), (3, 2048, 10)]
    back = [(3, 10, 2048), (10, 3, 2048), (3, 2048, 2048), (3, 2048, 256)]  # of weights the head's alone
    assert sorted(calls) == sorted(forward + back)


def plain(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w)


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x, w)


NOT_FOR_IT: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: plain(matrix(4, 3).double(), matrix(2, 3).double()),
    "bfloat16": lambda: plain(matrix(4, 3).bfloat16(), matrix(2, 3).bfloat16()),
    "a vector": lambda: plain(matrix(4, 3)[0], matrix(2, 3)),
    "a weight that is a vector": lambda: plain(matrix(4, 3), matrix(2, 3)[0]),
    "no samples": lambda: plain(matrix(4, 3)[:0], matrix(2, 3)),
    "another device": lambda: plain(matrix(4, 3).to("meta"), matrix(2, 3).to("meta")),
    "autocast": lambda: under_autocast(matrix(4, 3), matrix(2, 3)),
    "a transform": lambda: torch.func.vmap(plain)(matrix(8, 3).view(2, 4, 3), matrix(4, 3).view(2, 2, 3)),
    "a derivative by a transform": lambda: torch.func.grad(lambda x: plain(x, matrix(2, 3)).sum())(matrix(4, 3)),
}


@pytest.mark.parametrize("case", NOT_FOR_IT)
def test_what_is_not_for_it_is_left_to_torch(case: str, calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LARGE", 1)
    expected = NOT_FOR_IT[case]()
    with quick_linear_layers():
        found = NOT_FOR_IT[case]()
    assert not calls
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if found.device.type == "cpu":
        assert torch.equal(found, expected)


def test_compiled_models() -> None:
    x, w = matrix(6, 5), matrix(3, 5, 1).requires_grad_()
    expected = torch.autograd.grad(linear(x.double(), w.double()).square().sum(), w)[0]
    torch.compiler.reset()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    with quick_linear_layers():
        torch.testing.assert_close(torch.autograd.grad(compiled(x, w).square().sum(), w)[0], expected, **CLOSE)


def test_small_products_are_torch_s(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LARGE", 4 * 5 * 6 + 1)
    a, b, total = matrix(4, 5), matrix(5, 6, 1), matrix(4, 6, 2)
    assert torch.equal(product(a, b), a @ b)
    assert torch.equal(less_product(total, a, b), torch.addmm(total, a, b, alpha=-1))
    plus_product(total, a, b, scale=2.0, keep=0.5, out=(found := torch.empty(4, 6)))
    assert torch.equal(found, torch.addmm(total, a, b, alpha=2, beta=0.5))
    assert not calls


def test_wrong_shapes_are_torch_s_to_refuse() -> None:
    with quick_linear_layers(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(matrix(4, 3), matrix(2, 5))


@pytest.mark.parametrize(
    ("maker", "capability", "quicker"),
    [("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False),
     ("", "AVX512", False)],
)  # fmt: skip
def test_which_processors_it_is_for(
    maker: str, capability: str, quicker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "processor_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert onednn_is_quicker.__wrapped__() is quicker
    monkeypatch.setattr(products, "_onednn_product", lambda: None)
    assert not onednn_is_quicker.__wrapped__()


def test_elsewhere_linear_layers_are_torch_s(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)
    with quick_linear_layers():
        linear(matrix(4, 3), matrix(2, 3))
    product(matrix(4, 3), matrix(3, 2))
    assert not calls


def test_the_processor_s_maker(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from steppe import machine

    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", told)
    monkeypatch.setattr("platform.processor", lambda: "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD")
    assert processor_maker() == "AuthenticAMD"  # as Windows tells it
    told.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: X\n")
    assert processor_maker() == "GenuineIntel"
    told.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    monkeypatch.setattr("platform.processor", lambda: "")
    assert processor_maker() == ""
