"""The soft projector against dense matrices Σ λ_i u_i u_iᵀ, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_projectors, orthonormal, projected_rows
from torch import Tensor

from steppe.fast.factored import FactoredGrad, to_dense
from steppe.projection.matrix_projector import MatrixProjector, matrix_of
from steppe.projection.projector import SoftProjector

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def random_projector(groups: int, inputs: int, ranks: list[int], seed: int) -> SoftProjector:
    """A projector with random importances whose groups have the given ranks, padded to the largest."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.zeros(groups, inputs, max(ranks), dtype=torch.float64)
    for group, rank in enumerate(ranks):
        basis[group, :, :rank] = orthonormal(inputs, rank, generator)
    return SoftProjector(basis, torch.rand(groups, max(ranks), dtype=torch.float64, generator=generator))


@st.composite
def projectors(draw: st.DrawFn) -> tuple[SoftProjector, Tensor]:
    """A projector with any groups and ranks, and a gradient of a weight's shape (convolutions too)."""
    groups = draw(st.integers(1, 3))
    kernel = draw(st.sampled_from([(), (2,), (2, 3)]))
    channels = draw(st.integers(1, 4))
    inputs = channels * (kernel[0] * kernel[-1] if len(kernel) == 2 else kernel[0] if kernel else 1)
    ranks = draw(st.lists(st.integers(0, inputs), min_size=groups, max_size=groups).filter(any))
    seed = draw(st.integers(0, 10_000))
    rows = groups * draw(st.integers(1, 3))
    gradient = torch.randn(rows, channels, *kernel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return random_projector(groups, inputs, ranks, seed + 1), gradient


@given(projectors())
def test_dense_gradients_equal_dense_matrices(case: tuple[SoftProjector, Tensor]) -> None:
    p, g = case
    matrices = dense_projectors(p.basis, p.importance)
    within = projected_rows(g, matrices)
    torch.testing.assert_close(p.project_onto(g), within, **CLOSE)
    torch.testing.assert_close(p.project_out(g), g - within, **CLOSE)
    known = p.coordinates(g)
    assert isinstance(known, Tensor)
    assert known.ndim == (3 if len(p.basis) > 1 else 2)
    for group, vectors in enumerate(p.basis):
        rows = g.reshape(len(p.basis), -1, p.basis.shape[1])[group]
        torch.testing.assert_close(known.reshape(len(p.basis), -1, known.shape[-1])[group], rows @ vectors, **CLOSE)
    torch.testing.assert_close(p.project_onto(g, known), within, **CLOSE)
    torch.testing.assert_close(p.project_out(g, known), g - within, **CLOSE)


@given(projectors())
def test_a_matrix_projects_like_its_basis(case: tuple[SoftProjector, Tensor]) -> None:
    p, g = case
    matrix = MatrixProjector(matrix_of(p.basis, p.importance), p.importance)
    for known in (None, matrix.coordinates(g)):
        torch.testing.assert_close(matrix.project_onto(g, known), p.project_onto(g), **CLOSE)
        torch.testing.assert_close(matrix.project_out(g, known), p.project_out(g), **CLOSE)
    torch.testing.assert_close(matrix.matrix, torch.stack(dense_projectors(p.basis, p.importance)), **CLOSE)
    assert matrix.max_rank == p.max_rank
    if len(p.basis) == 1:
        rows = g.reshape(-1, p.basis.shape[1])
        factors = FactoredGrad(torch.eye(len(rows), dtype=torch.float64), rows)
        torch.testing.assert_close(to_dense(matrix.project_onto(factors)), to_dense(p.project_onto(factors)), **CLOSE)
        torch.testing.assert_close(to_dense(matrix.project_out(factors)), to_dense(p.project_out(factors)), **CLOSE)


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7), st.integers(0, 10_000), st.data())
def test_factors_equal_their_product(n: int, rows: int, inputs: int, seed: int, data: st.DataObject) -> None:
    """A factored gradient gives the same matrix, and its coordinates stay factored."""
    generator = torch.Generator().manual_seed(seed)
    factors = FactoredGrad(
        torch.randn(n, rows, dtype=torch.float64, generator=generator),
        torch.randn(n, inputs, dtype=torch.float64, generator=generator),
    )
    p = random_projector(1, inputs, [data.draw(st.integers(1, inputs))], seed)
    g = factors.dense()
    known = p.coordinates(factors)
    assert isinstance(known, FactoredGrad)
    torch.testing.assert_close(known.dense(), g @ p.basis[0], **CLOSE)
    for given_coordinates in (None, known):
        torch.testing.assert_close(to_dense(p.project_onto(factors, given_coordinates)), p.project_onto(g), **CLOSE)
        torch.testing.assert_close(to_dense(p.project_out(factors, given_coordinates)), p.project_out(g), **CLOSE)
    torch.testing.assert_close(factors.squared_norm(), g.square().sum(), rtol=1e-9, atol=1e-12)


@given(projectors())
def test_properties(case: tuple[SoftProjector, Tensor]) -> None:
    """The two parts add up to the gradient; λ = 1 projects (twice is once, and the parts are orthogonal); λ = 0 does
    nothing."""
    p, g = case
    torch.testing.assert_close(p.project_onto(g) + p.project_out(g), g, **CLOSE)
    hard = p.with_importance(torch.ones_like(p.importance))
    torch.testing.assert_close(hard.project_onto(hard.project_onto(g)), hard.project_onto(g), **CLOSE)
    torch.testing.assert_close(hard.project_out(hard.project_out(g)), hard.project_out(g), **CLOSE)
    assert float((hard.project_onto(g) * hard.project_out(g)).sum().abs()) < 1e-10
    none = p.with_importance(torch.zeros_like(p.importance))
    assert not none.project_onto(g).any()
    assert torch.equal(none.project_out(g), g)


def test_input_gradient_is_not_changed() -> None:
    p, g = random_projector(2, 6, [3, 2], 0), torch.randn(4, 3, 2, dtype=torch.float64)
    before = g.clone()
    p.project_onto(g)
    p.project_out(g)
    assert torch.equal(g, before)


@pytest.mark.parametrize(
    ("ranks", "rank", "held"), [([3], 3, [0, 1, 2]), ([2, 3], 5, [0, 1, 3, 4, 5]), ([0, 2], 2, [2, 3])]
)
def test_rank_and_importances_ignore_padding(ranks: list[int], rank: int, held: list[int]) -> None:
    p = random_projector(len(ranks), 4, ranks, 1)
    assert (p.rank, p.max_rank) == (rank, 4 * len(ranks))
    assert torch.equal(p.active_importance, p.importance.flatten()[held])
