"""Bases against a full SVD, and the energy criterion in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from reference import leading_directions, orthonormal, widest_angle
from torch import Tensor

from steppe.projection.basis import Representation, Spectrum, select_leading


def feed(columns: Tensor, sizes: list[int]) -> Representation:
    """A representation to which (groups, n, in) is added in chunks of the given sizes, then the rest."""
    representation = Representation()
    rest = columns
    for size in sizes:
        representation.add(rest[:, :size])
        rest = rest[:, size:]
    if rest.shape[1]:
        representation.add(rest)
    return representation


def bases(representation: Representation, threshold: float) -> list[Tensor]:
    """The directions of every group without padding."""
    spectrum = representation.spectrum()
    assert spectrum is not None
    kept = select_leading(spectrum, threshold)
    return [vectors[:, values > 0] for vectors, values in zip(kept.vectors, kept.values, strict=True)]


def falling(inputs: int, n: int, rate: float, seed: int = 0) -> Tensor:
    """R with singular values 1, rate, rate², …, as (1, n, in)."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(inputs, n)
    values = rate ** torch.arange(rank, dtype=torch.float64)
    r = orthonormal(inputs, rank, generator) @ torch.diag(values) @ orthonormal(n, rank, generator).T
    return r.T[None].contiguous()


# Singular values 0.1^j: the first k miss the share 0.01^k of the energy, so each threshold has one right answer. The
# Gram matrix resolves directions of energy 1e-10 only to about 1e-16 / 1e-10, hence the tolerance of the angle.
@pytest.mark.parametrize("n", [9, 60], ids=["columns", "gram"])
@pytest.mark.parametrize(
    ("threshold", "rank", "angle"),
    [
        (0.5, 1, 1e-12),
        (0.98, 1, 1e-12),
        (0.995, 2, 1e-10),
        (1 - 1e-5, 3, 1e-9),
        (1 - 1e-9, 5, 1e-5),
        (1 - 1e-11, 6, 1e-4),
    ],
)
def test_basis_equals_the_full_svd(n: int, threshold: float, rank: int, angle: float) -> None:
    columns = falling(12, n, 0.1)
    (found,) = bases(feed(columns, []), threshold)
    expected, _ = leading_directions(columns[0].T, threshold)
    assert found.shape[1] == rank
    assert widest_angle(found, expected) < angle
    torch.testing.assert_close(found.T @ found, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-12)


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=4, max_size=4), min_size=1, max_size=3),
    st.integers(1, 1024),
)
@example([[3, 3, 3, 3]], 512)
@example([[2, 2, 2, 2], [4, 0, 0, 0]], 768)
@example([[5, 1, 0, 0], [0, 0, 0, 0]], 1024)
def test_the_energy_criterion_exactly(values: list[list[int]], numerator: int) -> None:
    """k directions reach the share, and k − 1 do not.

    The values are integers and a binary fraction, so nothing is rounded.
    """
    rows = [sorted(row, reverse=True) for row in values]
    threshold = Fraction(numerator, 1024)
    unit = torch.eye(4, dtype=torch.float64)
    spectrum = Spectrum(torch.tensor(rows, dtype=torch.float64), unit.repeat(len(rows), 1, 1))
    kept = select_leading(spectrum, float(threshold))
    ranks = []
    for row, left, vectors in zip(rows, kept.values, kept.vectors, strict=True):
        rank = int((vectors.square().sum(0) > 0).sum())
        ranks.append(rank)
        energy = [Fraction(value) ** 2 for value in row]
        assert sum(energy[:rank]) >= threshold * sum(energy)
        assert rank == 0 or sum(energy[: rank - 1]) < threshold * sum(energy)
        assert left[:rank].tolist() == row[:rank]
        assert not left[rank:].any()
    assert kept.vectors.shape[-1] == kept.values.shape[-1] == max(ranks)


@given(st.integers(1, 30), st.lists(st.integers(1, 9), max_size=5), st.integers(1, 2), st.integers(0, 10_000))
def test_adding_in_chunks_equals_adding_at_once(n: int, sizes: list[int], groups: int, seed: int) -> None:
    """Whether the chunks stay columns, become a Gram matrix, or switch from one to the other."""
    columns = torch.randn(groups, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    once, chunked = feed(columns, []).spectrum(), feed(columns, sizes).spectrum()
    assert once is not None
    assert chunked is not None
    for found in (once, chunked):
        exact = torch.linalg.svdvals(columns)
        torch.testing.assert_close(found.values[:, : exact.shape[-1]], exact, rtol=1e-9, atol=1e-6)
    for one, other in zip(bases(feed(columns, []), 0.9), bases(feed(columns, sizes), 0.9), strict=True):
        assert widest_angle(one, other) < 1e-6


@pytest.mark.parametrize("repeats", [1, 5], ids=["columns", "gram"])
def test_rank_deficient_inputs_and_duplicate_samples(repeats: int) -> None:
    """Three directions are three, however many samples lie in them, at the highest threshold."""
    generator = torch.Generator().manual_seed(5)
    plane = orthonormal(10, 3, generator)
    few = torch.randn(7, 3, dtype=torch.float64, generator=generator) @ plane.T
    (found,) = bases(feed(few.repeat(repeats, 1)[None], [4]), 1 - 1e-11)
    assert widest_angle(found, plane) < 1e-7


def test_groups_of_different_rank_are_padded_with_zeros() -> None:
    generator = torch.Generator().manual_seed(6)
    planes = [orthonormal(6, rank, generator) for rank in (1, 4, 2)]
    columns = torch.stack([torch.randn(20, p.shape[1], dtype=torch.float64, generator=generator) @ p.T for p in planes])
    spectrum = feed(columns, []).spectrum()
    assert spectrum is not None
    kept = select_leading(spectrum, 1 - 1e-10)
    assert kept.vectors.shape == (3, 6, 4)
    for vectors, plane in zip(kept.vectors, planes, strict=True):
        rank = plane.shape[1]
        assert widest_angle(vectors[:, :rank], plane) < 1e-6
        assert not vectors[:, rank:].any()


@pytest.mark.parametrize("n", [3, 20], ids=["columns", "gram"])
def test_all_zero_input_has_an_empty_basis(n: int) -> None:
    spectrum = feed(torch.zeros(2, n, 6), []).spectrum()
    assert spectrum is not None
    assert select_leading(spectrum, 1 - 1e-11).vectors.shape == (2, 6, 0)


def test_empty_representation_has_no_spectrum() -> None:
    assert Representation().spectrum() is None


def test_float32_inputs_are_added_as_float64() -> None:
    """In float32, the Gram matrix would lose directions of energy 1e-8, which the threshold requires."""
    columns = falling(8, 40, 0.01).float()
    (found,) = bases(feed(columns, [10, 10]), 1 - 1e-10)
    assert found.dtype == torch.float64
    assert widest_angle(found, leading_directions(columns[0].double().T, 1 - 1e-10)[0]) < 1e-4


@pytest.mark.parametrize("threshold", [0.9, 0.97, 0.997])
@pytest.mark.parametrize("rows", [40, 200], ids=["fewer columns than rows", "more"])
def test_low_thresholds_give_the_same_directions_in_float32(threshold: float, rows: int) -> None:
    """In float32, chunk by chunk, against the SVD of the whole in float64: the same rank and the same subspace."""
    generator = torch.Generator().manual_seed(1)
    decay = torch.logspace(0, -2, 64, dtype=torch.float64)
    mixing = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=generator)).Q
    columns = (torch.randn(rows, 64, dtype=torch.float64, generator=generator) * decay) @ mixing + 0.1
    representation = Representation(threshold)
    for part in columns.float().split(13):
        representation.add(part[None])
    spectrum = representation.spectrum()
    assert spectrum is not None
    found = select_leading(spectrum, threshold).vectors[0].double()
    vectors, values, _ = torch.linalg.svd(columns.T, full_matrices=False)
    energy = values.square().cumsum(0) / values.square().sum()
    expected = vectors[:, : int((energy < threshold).sum()) + 1]
    assert found.shape == expected.shape
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=0, atol=1e-3)


def test_thresholds_near_1_use_float64() -> None:
    """Directions with a millionth of the energy need it."""
    generator = torch.Generator().manual_seed(2)
    weak = torch.zeros(300, 20)
    weak[:, 0], weak[:, 1] = torch.randn(300, generator=generator), 1e-4 * torch.randn(300, generator=generator)
    turn = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64, generator=generator)).Q.float()
    columns = weak @ turn
    for threshold, error in ((1 - 1e-9, 1e-2), (0.9991, 1e-2), (0.999, 0.0), (0.99, 0.0)):
        representation = Representation(threshold)
        representation.add(columns[None])
        spectrum = representation.spectrum()
        assert spectrum is not None
        if error:
            assert spectrum.values.dtype == torch.float64
            assert float(spectrum.values[0, 1]) == pytest.approx(float(weak[:, 1].norm()), rel=error)
        else:
            assert spectrum.values.dtype == torch.float32


@pytest.mark.parametrize("threshold", [0.9, 1.0], ids=["coarse", "precise"])
@pytest.mark.parametrize("n", [1, 60], ids=["columns", "gram"])
@pytest.mark.parametrize("value", [1.0, 1e16, 1.5e19, torch.inf, torch.nan])
def test_non_finite_representation_is_detected(value: float, n: int, threshold: float) -> None:
    """Also if the inputs are finite, but their product overflows in their precision."""
    representation = Representation(threshold)
    assert representation.is_finite()  # nothing was added
    for part in (torch.ones(1, n, 4), torch.full((1, n, 4), value)):
        representation.add(part)
    coarse = n == 60 and threshold < 1
    assert representation.is_finite() == (value < (1e19 if coarse else torch.inf))
    if representation.is_finite():
        spectrum = representation.spectrum()
        assert spectrum is not None
        assert all(bool(part.isfinite().all()) for part in spectrum)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("groups", [1, 2])
def test_faint_directions_of_the_smaller_product_are_dropped(groups: int, scale: float) -> None:
    """If there are fewer columns than rows and the threshold is low, u = R v / σ comes from RᵀR, whose rounding error
    is relative to the strongest energy. A direction with a billionth of that energy is still the SVD's; a weaker one is
    dropped, because it would be amplified rounding noise."""
    energies = torch.tensor([1.0, 1e-3, 1e-6, 3e-9, 3e-10, 1e-14, 1e-20], dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    columns = torch.stack(
        [
            orthonormal(9, 7, generator)
            @ torch.diag(scale * (group + 1) * energies.sqrt())
            @ orthonormal(12, 7, generator).T
            for group in range(groups)
        ]
    )  # nine columns of rank 7, (groups, n, in)
    representation = Representation(0.9)
    representation.add(columns)
    spectrum = representation.spectrum()
    assert spectrum is not None
    vectors, values, _ = torch.linalg.svd(columns.mT, full_matrices=False)
    for group in range(groups):
        held, exact = spectrum.values[group], values[group]
        assert (held > 0).tolist() == [True] * 4 + [False] * 5
        torch.testing.assert_close(held[:4], exact[:4], rtol=1e-5, atol=0)
        assert not spectrum.vectors[group][:, 4:].any()
        for found, expected in zip(spectrum.vectors[group][:, :4].T, vectors[group][:, :4].T, strict=True):
            assert float(found.norm()) == pytest.approx(1, abs=1e-5)
            assert float((found @ expected).abs()) == pytest.approx(1, abs=1e-5)


def test_strengths_along_missing_directions() -> None:
    """From the Gram matrix, whose rounding may give less than 0, as from the columns."""
    below = False
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        plane = orthonormal(10, 3, generator)
        columns = (torch.randn(60, 3, dtype=torch.float64, generator=generator) @ plane.T)[None]
        basis = torch.linalg.qr(torch.cat([plane, torch.randn(10, 7, dtype=torch.float64, generator=generator)], 1)).Q
        gram = columns[0].T @ columns[0]
        below |= bool(((basis * (gram @ basis)).sum(0) < 0).any())
        expected = torch.linalg.vector_norm(columns[0] @ basis, dim=0)
        found = feed(columns, [7]).strengths_along(basis[None])
        torch.testing.assert_close(found, expected[None], rtol=1e-9, atol=1e-6)
    assert below, "else the case does not show it"
