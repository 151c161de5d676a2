"""Means over seeds, and tests whether two methods differ: paired or Welch t-test, with Holm correction."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

TOO_FEW = "too few seeds"
NO_SPREAD = "no spread over seeds"
_ROUNDING = 64 * sys.float_info.epsilon  # relative to the largest value, for means over tens of tasks


@dataclass(frozen=True)
class MeanStd:
    """A mean and its sample standard deviation; None for a single value."""

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def mean_std(values: Iterable[float | None]) -> MeanStd | None:
    """Mean and sample standard deviation.

    Args:
        values: The values; None for those that are missing.

    Returns:
        Mean and deviation of the known values; None if there are none.

    Example:
        >>> str(mean_std([1.0, None, 3.0]))
        '2.00 ± 1.41'
    """
    known = [value for value in values if value is not None]
    return MeanStd(fmean(known), stdev(known) if len(known) > 1 else None) if known else None


@dataclass(frozen=True)
class MeanDifference:
    """The difference between two methods.

    Attributes:
        mean: Mean difference; None if one of them has no values.
        seeds: Number of pairs, or of each side's seeds if they are not paired.
        p: Two-sided p-value.
        reason: Why there is no p-value.
    """

    mean: float | None
    seeds: tuple[int, ...]
    p: float | None = None
    reason: str = ""


def compare_means(first: Mapping[int, float], second: Mapping[int, float]) -> MeanDifference:
    """Compare two methods: first minus second.

    The t-test is paired over shared seeds, or Welch's if they share fewer than two. Paired, with differences d:
        t = mean(d) / (std(d) / sqrt(n)),  n - 1 degrees of freedom.

    Args:
        first: Values of the first method by seed.
        second: Values of the second method by seed.

    Returns:
        The difference, with the p-value or the reason why there is none.

    Example:
        >>> compare_means({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.5}).mean
        0.75
    """
    if not first or not second:
        return MeanDifference(None, (0,), reason=TOO_FEW)
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        return _welch(list(first.values()), list(second.values()))
    gaps = [first[seed] - second[seed] for seed in shared]
    mean, std = fmean(gaps), stdev(gaps)
    if _only_rounding([std], [value for seed in shared for value in (first[seed], second[seed])]):
        return MeanDifference(mean, (len(gaps),), reason=NO_SPREAD)
    return MeanDifference(mean, (len(gaps),), _two_sided(mean / (std / math.sqrt(len(gaps))), len(gaps) - 1))


def _welch(first: Sequence[float], second: Sequence[float]) -> MeanDifference:
    """Compare two methods by Welch's t-test.

    With u = var(a) / n and v = var(b) / m:  t = (mean(a) - mean(b)) / sqrt(u + v),
    (u + v)^2 / (u^2 / (n - 1) + v^2 / (m - 1)) degrees of freedom.

    Args:
        first: The n values a.
        second: The m values b.

    Returns:
        The difference, with the p-value or the reason why there is none.
    """
    mean, seeds = fmean(first) - fmean(second), (len(first), len(second))
    if min(seeds) < 2:
        return MeanDifference(mean, seeds, reason=TOO_FEW)
    stds = [stdev(values) for values in (first, second)]
    if _only_rounding(stds, [*first, *second]):
        return MeanDifference(mean, seeds, reason=NO_SPREAD)
    u, v = (std**2 / count for std, count in zip(stds, seeds, strict=True))
    freedom = (u + v) ** 2 / (u**2 / (len(first) - 1) + v**2 / (len(second) - 1))
    return MeanDifference(mean, seeds, _two_sided(mean / math.sqrt(u + v), freedom))


def _only_rounding(stds: Iterable[float], values: Iterable[float]) -> bool:
    """Whether these deviations are no larger than rounding errors of equal values, so that t is meaningless."""
    return max(stds) <= _ROUNDING * max(map(abs, values))


def _two_sided(t: float, freedom: float) -> float:
    """The two-sided p-value of t."""
    from scipy.special import stdtr  # imported here: a report on one method does not need it

    return float(2 * stdtr(freedom, -abs(t)))


def holm_correction(values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: the k-th smallest of m p-values (from 0) times m - k, made monotone, at most 1.

    Args:
        values: The p-values of one family; None for comparisons without a test, which do not count.

    Returns:
        The corrected p-values in the same order.

    Example:
        >>> holm_correction([0.01, None, 0.04])
        [0.02, None, 0.04]
    """
    order = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    least = 0.0
    for rank, (value, place) in enumerate(order):
        least = max(least, min(1.0, value * (len(order) - rank)))
        corrected[place] = least
    return corrected
