"""Means over seeds and tests of differences, against scipy and against Holm's procedure step by step."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steppe.results.statistics import NO_SPREAD, TOO_FEW, MeanStd, compare_means, holm_correction, mean_std

VALUES = st.lists(st.floats(0, 100), min_size=2, max_size=8)


@given(VALUES)
def test_spread_is_mean_and_sample_deviation(values: list[float]) -> None:
    found = mean_std([values[0], None, *values[1:]])
    assert found is not None
    assert found.mean == pytest.approx(numpy.mean(values))
    assert found.std == pytest.approx(numpy.std(values, ddof=1), abs=1e-9)


def test_spread_of_one_value_and_of_none() -> None:
    assert mean_std([3.0]) == MeanStd(3.0)
    assert mean_std([None]) is None
    assert mean_std([]) is None


def test_equal_seeds_are_paired() -> None:
    first = {0: 77.1, 1: 78.4, 2: 76.9, 3: 77.7}
    second = {3: 76.0, 2: 76.6, 1: 77.2, 0: 75.1}
    found = compare_means(first, second)
    twin = stats.ttest_rel([first[seed] for seed in range(4)], [second[seed] for seed in range(4)])
    assert found.seeds == (4,)
    assert found.mean == pytest.approx(1.3)
    assert found.p == pytest.approx(twin.pvalue, rel=1e-12)


def test_only_shared_seeds_are_paired() -> None:
    found = compare_means({0: 1.0, 1: 2.0, 2: 4.0, 9: 50.0}, {0: 0.5, 1: 1.7, 2: 2.0, 5: -50.0})
    twin = stats.ttest_rel([1.0, 2.0, 4.0], [0.5, 1.7, 2.0])
    assert found.seeds == (3,)
    assert found.p == pytest.approx(twin.pvalue, rel=1e-12)


@pytest.mark.parametrize("second", [{5: 3.0, 6: 4.5, 7: 3.3}, {0: 3.0, 6: 4.5}])
def test_other_seeds_are_compared_by_welch(second: dict[int, float]) -> None:
    first = {0: 1.0, 1: 2.0, 2: 4.0, 3: 2.5}
    found = compare_means(first, second)
    twin = stats.ttest_ind(list(first.values()), list(second.values()), equal_var=False)
    assert found.seeds == (4, len(second))
    assert found.p == pytest.approx(twin.pvalue, rel=1e-9)


def test_one_seed_is_too_few() -> None:
    for first, second in (({0: 1.0}, {0: 2.0}), ({0: 1.0}, {1: 2.0, 2: 3.0}), ({0: 1.0}, {})):
        found = compare_means(first, second)
        assert found.p is None
        assert found.reason == TOO_FEW
    assert compare_means({0: 1.0}, {0: 2.0}).mean == -1.0


def test_without_spread_there_is_no_test() -> None:
    assert compare_means({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}).reason == NO_SPREAD
    assert compare_means({0: 2.0, 1: 2.0}, {2: 1.0, 3: 1.0}).reason == NO_SPREAD


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({0: 70.1, 1: 80.2}, {0: 70.0, 1: 80.1}),
        ({0: 70.1, 1: 80.2, 2: 60.3}, {0: 70.0, 1: 80.1, 2: 60.2}),
        ({0: -6.1, 1: -0.2}, {0: -6.0, 1: -0.1}),
        ({0: 0.3, 1: 0.1 + 0.2}, {2: 0.7, 3: 0.7}),  # by Welch
    ],
)
def test_rounding_errors_are_not_a_spread(first: dict[int, float], second: dict[int, float]) -> None:
    found = compare_means(first, second)
    assert (found.p, found.reason) == (None, NO_SPREAD)
    clear = compare_means({**first, 0: first[0] + 1e-9}, second)  # small, but far above rounding
    assert clear.p is not None


HITS = st.lists(st.integers(0, 2000), min_size=3, max_size=3)  # of 2,000 test samples, for each of three tasks


@given(st.lists(st.tuples(HITS, HITS), min_size=2, max_size=6), st.booleans())
def test_equal_differences_are_detected_as_in_exact_arithmetic(
    counts: list[tuple[list[int], list[int]]], level: bool
) -> None:
    """Accuracies in percent, and their means, are rounded; the reference computes with fractions."""
    if level:  # each seed has the first one's difference on every task, as far as possible
        gap = min(2000 - max(hits) for hits, _ in counts)
        counts = [(hits, [hit + gap for hit in hits]) for hits, _ in counts]
    means = [[sum(100 * hit / 2000 for hit in hits) / 3 for hits in pair] for pair in counts]
    found = compare_means(*({seed: pair[side] for seed, pair in enumerate(means)} for side in (0, 1)))
    exact = [Fraction(sum(one) - sum(other), 60) for one, other in counts]
    centre = sum(exact) / len(exact)
    variance = sum((gap - centre) ** 2 for gap in exact) / (len(exact) - 1)
    if variance == 0:
        assert (found.p, found.reason) == (None, NO_SPREAD)
    else:
        t = float(centre) / math.sqrt(variance / len(exact))
        assert found.p == pytest.approx(2 * stats.t.sf(abs(t), len(exact) - 1), rel=1e-6)


def rejected(values: list[float], level: float) -> list[bool]:
    """Holm's procedure as published: ascend from the smallest p, and stop at the first that is too large."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    found = [False] * len(values)
    for rank, place in enumerate(order):
        if values[place] > level / (len(values) - rank):
            break
        found[place] = True
    return found


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.999))
def test_holm_rejects_what_the_procedure_rejects(values: list[float], level: float) -> None:
    corrected = holm_correction(values)
    for adjusted, twin in zip(corrected, rejected(values, level), strict=True):
        assert adjusted is not None
        if not math.isclose(adjusted, level, rel_tol=1e-9):
            assert (adjusted <= level) == twin


def test_untested_comparisons_are_not_corrected_for() -> None:
    assert holm_correction([None, 0.01, None, 0.04]) == [None, 0.02, None, 0.04]
    assert holm_correction([0.6, 0.7]) == [1.0, 1.0]
