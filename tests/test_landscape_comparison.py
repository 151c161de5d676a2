"""Accuracy beside flatness: the rank correlation against counting by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.landscape.comparison import rank_correlations


def rows_of(values: list[tuple[float, float]]) -> list[dict[str, object]]:
    return [
        {"method": f"m{number}", "seed": 0, "acc": acc, "bwt": 1.0, "sharpness_at_the_end": sharpness}
        for number, (acc, sharpness) in enumerate(values)
    ]


@given(st.lists(st.integers(0, 50), min_size=3, max_size=8, unique=True), st.randoms())
def test_the_rank_correlation_is_one_minus_six_times_the_squared_differences(accs: list[int], chance: object) -> None:
    """1 − 6 Σ d² / (n (n² − 1)) where no two are alike; only the order counts."""
    sharpness = list(accs)
    chance.shuffle(sharpness)  # type: ignore[attr-defined]
    (found,) = rank_correlations(rows_of([(acc, 1.5**s) for acc, s in zip(accs, sharpness, strict=True)]))
    squares = sum(
        (sorted(accs).index(a) - sorted(sharpness).index(s)) ** 2 for a, s in zip(accs, sharpness, strict=True)
    )
    count = len(accs)
    assert found["measure"] == "sharpness_at_the_end"
    assert found["rank_correlation_with_acc"] == pytest.approx(1 - 6 * squares / (count * (count**2 - 1)))


def test_there_must_be_something_to_correlate() -> None:
    assert rank_correlations([]) == []
    assert rank_correlations(rows_of([(1, 2), (2, 1)])) == []
    assert rank_correlations(rows_of([(1, 2), (2, 2), (3, 2)])) == []
