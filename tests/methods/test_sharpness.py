"""Gradients of the perturbed loss L_{D∪N}(w + v) in λ and in w against central finite differences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from reference import Sample, central_differences, soften
from reference_update import PROBLEMS, FlatUpdate, coverage
from torch import Tensor

from steppe.fast.factored import FactoredGrad, to_dense
from steppe.methods.parts import sharpness as perturbation
from steppe.methods.parts.sharpness import SharpnessAscent
from steppe.network.network import Network
from steppe.projection.importance import Sigmoid, Spectral
from steppe.projection.memory import GradientMemory
from steppe.tensors.batch import Batch

PROBLEM = PROBLEMS["smooth"]  # tanh: finite differences need a loss without kinks


class Setup:
    """A network, a memory with soft importances, a batch D and replay N; and the same for the flat reference."""

    def __init__(self, *, lr: float, steps: int, chunked: bool, clamp: float = 1e3) -> None:
        generator = torch.Generator().manual_seed(4)
        self.model = PROBLEM.build()
        self.network = Network(self.model)
        self.network.heads.add(None, 4)
        self.memory = GradientMemory(Sigmoid(0.01), coverage(PROBLEM, self.model))
        self.memory.rebuild(self.network, torch.randn(4, 6, dtype=torch.float64, generator=generator), 0.95)
        soften(self.memory, generator)
        x = torch.randn(11, 6, dtype=torch.float64, generator=generator)
        self.union = Batch(x, torch.arange(11) % 4, torch.zeros(11, dtype=torch.int64))
        self.current = self.union[:6]
        values = SimpleNamespace(
            ascent_lr=lr,
            ascent_steps=steps,
            ascent_clamp=clamp,
            ascent_form="chunked" if chunked else "whole",
            buffer=1,
        )
        self.twin = FlatUpdate("fs-dgpm", values, PROBLEM, self.model, len)
        self.twin.bases.vectors = {name: [p.basis[0]] for name, p in self.memory.projectors.items()}
        self.twin.bases.importance = {name: [p.importance[0]] for name, p in self.memory.projectors.items()}

    def loss(self, w: Tensor, importances: Tensor) -> float:
        """L_{D∪N}(w + v(w, λ)) of the reference, with λ of all layers as one vector."""
        sizes = [len(xs[0]) for xs in self.twin.bases.importance.values()]
        parts = dict(zip(self.twin.bases.importance, ([x] for x in torch.split(importances, sizes)), strict=True))
        samples: list[Sample] = [(x, int(y), 0) for x, y in zip(self.union.x, self.union.y, strict=True)]
        return float(self.twin.perturbed_loss(w.clone().requires_grad_(), parts, samples[:6], samples).detach())

    @property
    def importances(self) -> Tensor:
        return torch.cat([p.importance[0] for p in self.memory.projectors.values()])


FORMS = [
    # steps, chunked, second order: with one step v's own gradient does not depend on λ, so first order is exact
    (1, False, False),
    (1, True, False),
    (1, False, True),
    (2, False, True),
    (2, True, True),
    (4, True, True),
]


@pytest.mark.parametrize(("steps", "chunked", "second"), FORMS)
@pytest.mark.parametrize("lr", [0.4, -0.4], ids=["ascent", "look-ahead"])
def test_importance_gradient_equals_finite_differences(steps: int, chunked: bool, second: bool, lr: float) -> None:
    setup = Setup(lr=lr, steps=steps, chunked=chunked)
    ascent = SharpnessAscent(lr, steps, clamp=1e3, chunked=chunked, second_order=second)
    found = ascent(setup.network, setup.memory, setup.current, setup.union)
    expected = central_differences(lambda x: setup.loss(setup.twin.w, x), setup.importances)
    slopes = found.importance_gradient
    assert slopes is not None
    assert float(expected.abs().max()) > 1e-4
    torch.testing.assert_close(slopes, expected, rtol=1e-6, atol=1e-9)
    assert float(found.loss) == pytest.approx(setup.loss(setup.twin.w, setup.importances), rel=1e-12)


@pytest.mark.parametrize(("steps", "chunked"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("clamp", [1e3, 0.05], ids=["free", "clamped"])
def test_second_order_weight_gradient_equals_finite_differences(steps: int, chunked: bool, clamp: float) -> None:
    """Through the ascent itself, and through the clamp, where clamped elements are constant."""
    setup = Setup(lr=0.4, steps=steps, chunked=chunked, clamp=clamp)
    ascent = SharpnessAscent(0.4, steps, clamp=clamp, chunked=chunked, second_order=True)
    found = ascent(setup.network, setup.memory, setup.current, setup.union)
    gradient = torch.cat([to_dense(g).flatten() for g in found.gradient.values()])
    chosen = torch.randperm(len(gradient))[:40]

    def loss(values: Tensor) -> float:
        w = setup.twin.w.clone()
        w[chosen] = values
        return setup.loss(w, setup.importances)

    expected = central_differences(loss, setup.twin.w[chosen])
    torch.testing.assert_close(gradient[chosen], expected, rtol=1e-6, atol=1e-9)


def test_no_gradient_in_fixed_importances() -> None:
    """The gradient in the weights is unchanged."""
    setup, found = Setup(lr=0.4, steps=2, chunked=True), []
    for rule in (Sigmoid(0.01), Spectral(2.0)):
        setup.memory.rule = rule
        ascent = SharpnessAscent(0.4, 2, chunked=True, second_order=True)
        found.append(ascent(setup.network, setup.memory, setup.current, setup.union))
    moving, still = found
    assert moving.importance_gradient is not None
    assert still.importance_gradient is None
    torch.testing.assert_close(still.gradient, moving.gradient)


def test_first_order_omits_a_small_term() -> None:
    """With two steps, the first-order gradient in λ omits a term that is not zero and falls with η1."""
    gaps = []
    for lr in (0.4, 0.04):
        setup = Setup(lr=lr, steps=2, chunked=False)
        first, second = (
            SharpnessAscent(lr, 2, clamp=1e3, second_order=order)(
                setup.network, setup.memory, setup.current, setup.union
            )
            for order in (False, True)
        )
        one, two = first.importance_gradient, second.importance_gradient
        assert one is not None
        assert two is not None
        gaps.append(float((one - two).norm() / two.norm()))
    assert gaps[0] > 1e-3
    assert gaps[1] < 0.3 * gaps[0]


@pytest.mark.parametrize(
    ("n", "steps", "chunked", "sizes"),
    [
        (10, 2, False, [10, 10]),
        (10, 2, True, [5, 5]),
        (10, 4, True, [3, 3, 3, 1]),
        (3, 5, True, [1, 1, 1]),
        (1, 2, True, [1]),
    ],
)
def test_schedule(n: int, steps: int, chunked: bool, sizes: list[int]) -> None:
    """Whole: K steps on all of D, and one loss at the end. Chunked: D split in order, with a loss after each chunk."""
    plan = list(SharpnessAscent(0.1, steps, chunked=chunked).schedule(n))
    assert [part.stop - part.start for part, _, _ in plan] == sizes
    ending = [False] * (len(sizes) - 1) + [True]
    assert [last for _, _, last in plan] == ending
    assert [evaluated for _, evaluated, _ in plan] == ([True] * len(sizes) if chunked else ending)
    walked = [sample for part, _, _ in plan for sample in range(part.start, part.stop)]
    assert walked == (list(range(n)) if chunked else list(range(n)) * steps)


@pytest.mark.parametrize("second", [False, True])
def test_ascent_does_not_change_the_model(second: bool) -> None:
    setup = Setup(lr=0.4, steps=2, chunked=True)
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    kept = {name: p.importance.clone() for name, p in setup.memory.projectors.items()}
    SharpnessAscent(0.4, 2, chunked=True, second_order=second)(setup.network, setup.memory, setup.current, setup.union)
    assert all(torch.equal(value, before[name]) for name, value in setup.model.state_dict().items())
    assert all(torch.equal(p.importance, kept[name]) for name, p in setup.memory.projectors.items())
    assert not any(p.importance.requires_grad for p in setup.memory.projectors.values())


EIGHTHS = st.integers(-16, 16).map(lambda number: number / 8)  # so that products and sums are exact, and ties are exact


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data(), st.integers(1, 320))
@example(1, 2, 2, None, 32)
@example(3, 2, 2, None, 97)
def test_clamping_factors_equals_clamping_their_product(
    n: int, rows: int, columns: int, data: st.DataObject | None, bound: int
) -> None:
    """Whatever bound is estimated for them. If no sum of |δ_ni X_nj| can exceed the bound, they stay factored."""
    if data is None:  # every entry is the bound 2 n · 2 itself, or 1/64 above it
        left, right = torch.full((n, rows), 2.0), torch.full((n, columns), 2.0)
        bound = 256 * n - bound % 2
    else:
        left, right = (
            torch.tensor([[data.draw(EIGHTHS) for _ in range(size)] for _ in range(n)]) for size in (rows, columns)
        )
    limit = bound / 64
    sums = [max(map(abs, a)) * max(map(abs, b)) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perturbation, "WIDE", 0)
        found = perturbation._clamp(FactoredGrad(left.double(), right.double()), limit, new=True)
    assert isinstance(found, FactoredGrad) == (rows * columns > 0 and sum(sums) <= limit)
    for i in range(rows):
        for j in range(columns):
            product = sum(float(left[k, i]) * float(right[k, j]) for k in range(n))
            assert float(to_dense(found)[i, j]) == min(max(product, -limit), limit)


@pytest.mark.parametrize("clamp", [1e3, 0.3, 0.1, 0.02])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("chunked", [False, True])
def test_factored_ascent_outside_chains_equals_the_reference(
    clamp: float, steps: int, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large matrices of a model that is not a linear chain: their steps come as factors, and must be clamped too."""
    monkeypatch.setattr(perturbation, "WIDE", 0)
    setup = Setup(lr=0.4, steps=steps, chunked=chunked, clamp=clamp)
    kinds: set[type] = set()
    clamped = perturbation._clamp

    def noted(d: Tensor | FactoredGrad, bound: float, new: bool) -> Tensor | FactoredGrad:
        kinds.add(type(d))
        return clamped(d, bound, new)

    monkeypatch.setattr(perturbation, "_clamp", noted)
    found = SharpnessAscent(0.4, steps, clamp=clamp, chunked=chunked)(
        setup.network, setup.memory, setup.current, setup.union
    )
    assert setup.network.chain is None
    assert FactoredGrad in kinds
    assert float(found.loss) == pytest.approx(setup.loss(setup.twin.w, setup.importances), rel=1e-12)
