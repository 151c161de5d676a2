"""Projectors and counts for weights in other layouts, against dense matrices and one-hot vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_projectors, orthonormal, projected_rows
from torch import Tensor
from whole_models import MODELS, build

import steppe
from steppe.fast.factored import columnwise_dot
from steppe.projection.basis import Representation
from steppe.projection.extend_basis import extend_basis
from steppe.projection.layouts import RowProjector, make_projector
from steppe.projection.projector import SoftProjector
from steppe.projection.row_counts import RowCounts
from steppe.projection.rules.registry import Layout

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def one_hot(rows: Tensor, size: int) -> Tensor:
    return torch.nn.functional.one_hot(rows, size).double()


@st.composite
def projectors(draw: st.DrawFn) -> tuple[SoftProjector, Tensor, Tensor]:
    """A projector in either layout, a gradient, and the same as in the memory's formulas, with outputs first."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    out, inputs = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    if draw(st.booleans()):
        rank = draw(st.integers(1, inputs))
        rows = torch.randperm(inputs, generator=generator)[:rank]
        gradient = torch.randn(inputs, out, dtype=torch.float64, generator=generator)
        importance = torch.rand(1, rank, dtype=torch.float64, generator=generator)
        return make_projector(Layout.TABLE, gradient, rows, importance), gradient, gradient.t()
    groups, kernel = draw(st.integers(1, 3)), draw(st.sampled_from([(2,), (1, 2), (2, 1, 2)]))
    width = inputs * torch.Size(kernel).numel()
    basis = torch.stack([orthonormal(width, draw(st.integers(2, 2)), generator) for _ in range(groups)])
    gradient = torch.randn(groups * inputs, out, *kernel, dtype=torch.float64, generator=generator)
    importance = torch.rand(groups, 2, dtype=torch.float64, generator=generator)
    seen = torch.cat([part.transpose(0, 1) for part in gradient.chunk(groups)])  # as a convolution's weight
    return make_projector(Layout.TRANSPOSED, gradient, basis, importance), gradient, seen


def dense(p: SoftProjector) -> list[Tensor]:
    basis = one_hot(p.basis, p.rows_in_all).t()[None] if isinstance(p, RowProjector) else p.basis
    return dense_projectors(basis, p.importance)


def as_seen(p: SoftProjector, tensor: Tensor) -> Tensor:
    if isinstance(p, RowProjector):
        return tensor.t()
    return torch.cat([part.transpose(0, 1) for part in tensor.chunk(len(p.basis))])


@given(projectors())
def test_projectors_equal_dense_matrices(case: tuple[SoftProjector, Tensor, Tensor]) -> None:
    p, g, seen = case
    within = projected_rows(seen.contiguous(), dense(p))
    before = g.clone()
    for known in (None, p.coordinates(g)):
        onto, out = p.project_onto(g, known), p.project_out(g, known)
        assert isinstance(onto, Tensor)
        assert isinstance(out, Tensor)
        assert onto.shape == out.shape == g.shape
        torch.testing.assert_close(as_seen(p, onto), within, **CLOSE)
        torch.testing.assert_close(onto + out, g, **CLOSE)
    assert torch.equal(g, before)
    hard = p.with_importance(torch.ones_like(p.importance))
    assert type(hard) is type(p)
    twice = hard.project_out(hard.project_out(g))
    assert isinstance(twice, Tensor)
    torch.testing.assert_close(twice, hard.project_out(g), **CLOSE)
    assert p.rank <= p.max_rank == sum(len(matrix) for matrix in dense(p))
    assert p.rank == p.active_importance.numel()


@given(projectors())
def test_importances_get_the_gradient_that_the_coordinates_give(case: tuple[SoftProjector, Tensor, Tensor]) -> None:
    """The dynamic rule and a second-order ascent use the same gradient."""
    p, g, _ = case
    other = torch.randn_like(g)
    leaf = p.importance.clone().requires_grad_()
    onto = p.with_importance(leaf).project_onto(g)
    assert isinstance(onto, Tensor)
    (slope,) = torch.autograd.grad((onto * other).sum(), leaf)
    found = columnwise_dot([p.coordinates(g)], p.coordinates(other))
    torch.testing.assert_close(found, slope, **CLOSE)


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=30), min_size=2, max_size=2),
    st.sampled_from([0.3, 0.5, 0.77, 0.9, 1.0]),
    st.booleans(),
)
def test_counts_keep_the_rows_that_one_hot_vectors_span(
    tasks: list[list[int]], threshold: float, first_is_empty: bool
) -> None:
    """Of rows with equal counts, either may come first; the counts of those held are the same."""
    old: Tensor | None = None
    dense_old: Tensor | None = None
    for place, looked_up in enumerate(tasks):
        rows = torch.tensor(looked_up if not (first_is_empty and place == 0) else [], dtype=torch.int64)
        counts, plain = RowCounts(7), Representation()
        counts.add(rows)
        plain.add(one_hot(rows, 7)[None])
        kept, expected = counts.leading(threshold), plain.leading(threshold)
        assert kept is not None
        if expected is not None:
            torch.testing.assert_close(kept.values, expected.values, rtol=1e-9, atol=1e-9)
            assert len(set(kept.vectors.tolist())) == expected.values.shape[1]
        torch.testing.assert_close(counts.energy(), torch.tensor([float(len(rows))], dtype=torch.float64))
        grown = counts.extend(old, threshold, first=place == 0)
        wide = extend_basis(plain, dense_old, threshold, first=place == 0)
        assert grown is not None
        if wide is not None:
            assert len(grown.basis) == wide.basis.shape[2]
            found, wanted = (part.strengths[0].square().sum() for part in (grown, wide))
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        old = grown.basis
        dense_old = one_hot(old, 7).t()[None] if len(old) else None
        assert len(set(old.tolist())) == len(old)


def test_rows_of_another_table_are_rejected() -> None:
    for rows, importance, reason in (
        ([0, 7], torch.ones(1, 2), "does not have all"),
        ([0, -1], torch.ones(1, 2), "does not have all"),
        ([0, 1], torch.ones(2), "do not match"),
    ):
        with pytest.raises(ValueError, match=reason):
            make_projector(Layout.TABLE, torch.zeros(7, 2), torch.tensor(rows), importance)
    with pytest.raises(ValueError, match="do not match"):
        make_projector(Layout.TABLE, torch.zeros(7, 2), torch.eye(7)[None], torch.ones(1, 7))
    with pytest.raises(ValueError, match="does not match"):
        make_projector(Layout.TRANSPOSED, torch.zeros(7, 2), torch.tensor([1]), torch.ones(1, 1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("name", ["gru", "autoencoder", "encoder layer"])
def test_saved_learner_continues_with_the_same_bits(name: str, second_order: bool, tmp_path: Path) -> None:
    """With dynamic importances."""
    tasks = [steppe.Task(MODELS[name][1](task)) for task in range(2)]
    method = steppe.FSDGPM(lr=0.1, threshold=0.99, basis_samples=6, importance_lr=0.3, second_order=second_order)
    learner = steppe.Learner(build(name), method)
    learner.learn(tasks[0], epochs=2)
    learner.save(tmp_path / "learner")
    loaded = steppe.load(tmp_path / "learner", build(name))
    for each in (learner, loaded):
        result = each.learn(tasks[1], epochs=2)
    moved = [importance["mean"] for importance in result.diagnostics["importances"].values()]
    assert min(moved) < 1
    one, other = learner.model.state_dict(), loaded.model.state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)
