"""Factored matrices: operations on the factors equal operations on the matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steppe.fast.factored import FactoredGrad, mean_of, to_dense
from steppe.methods.parts.sgd import scale_gradient


def random_factored(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    samples=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    dense=st.sets(st.integers(0, 3)),
    shared=st.booleans(),
)
def test_mean_of_factored_matrices(samples: list[int], shape: tuple[int, int], dense: set[int], shared: bool) -> None:
    out, inputs = shape
    same = random_factored(samples[0], inputs, 0)
    parts: list[torch.Tensor | FactoredGrad] = []
    for place, count in enumerate(samples):
        right = same if shared else random_factored(count, inputs, place)
        whole = FactoredGrad(random_factored(len(right), out, 10 + place), right)
        parts.append(whole.dense() if place in dense else whole)
    expected = sum((to_dense(part) for part in parts), torch.zeros(out, inputs, dtype=torch.float64)) / len(parts)
    before = [to_dense(part) for part in parts]
    torch.testing.assert_close(to_dense(mean_of(parts)), expected)
    assert all(torch.equal(to_dense(part), then) for part, then in zip(parts, before, strict=True))


def test_mean_stays_factored_if_smaller() -> None:
    same = random_factored(3, 4, 0)
    of_the_same = mean_of([FactoredGrad(random_factored(3, 2, seed), same) for seed in (1, 2)])
    assert isinstance(of_the_same, FactoredGrad)
    assert of_the_same.right is same
    few = mean_of([FactoredGrad(random_factored(3, 7, seed), random_factored(3, 4, seed)) for seed in (1, 2)])
    assert isinstance(few, FactoredGrad)
    assert len(few.left) == 6
    assert isinstance(
        mean_of([FactoredGrad(random_factored(3, 6, seed), random_factored(3, 4, seed)) for seed in (1, 2)]),
        torch.Tensor,
    )


@pytest.mark.parametrize(("out", "inputs"), [(3, 8), (8, 3), (4, 4)])
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25, dtype=torch.float64)], ids=["number", "tensor"])
def test_only_the_smaller_factor_is_multiplied(out: int, inputs: int, factor: float | torch.Tensor) -> None:
    whole, plain = FactoredGrad(random_factored(5, out, 0), random_factored(5, inputs, 1)), random_factored(2, 3, 2)
    found = scale_gradient({"factors": whole, "plain": plain}, factor)
    torch.testing.assert_close(to_dense(found["factors"]), factor * to_dense(whole))
    assert torch.equal(to_dense(found["plain"]), factor * plain)
    kept = found["factors"]
    assert isinstance(kept, FactoredGrad)
    assert (kept.left is whole.left, kept.right is whole.right) == (out > inputs, out <= inputs)
