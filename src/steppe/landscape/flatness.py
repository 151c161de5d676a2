"""Numbers for how flat a profile is: each along every direction, given as mean and standard deviation over them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.integrate import trapezoid

Profile = Sequence[float]


@dataclass(frozen=True)
class Estimate:
    """The mean of something over random draws; the spread is unknown (None) where there is only one draw."""

    mean: float
    std: float | None
    error: float | None
    """The mean's standard error: std / √draws."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From one value for each draw."""
        if len(values) < 2:
            return cls(values[0], None, None)
        std = statistics.stdev(values)
        return cls(statistics.fmean(values), std, std / math.sqrt(len(values)))


@dataclass(frozen=True)
class Flatness:
    """What the profiles of one task at one network say."""

    loss: float
    """g(0), the same along every direction."""
    sharpness: Estimate
    mean_rise: Estimate
    curvature: Estimate


def measure_flatness(profiles: Sequence[Profile], alphas: Sequence[float], radius: float) -> Flatness:
    """The figures of all directions, within |α| ≤ radius; α must be symmetric around its middle, 0."""
    return Flatness(
        profiles[0][len(alphas) // 2],
        Estimate.of([sharpness(g, alphas, radius) for g in profiles]),
        Estimate.of([mean_rise(g, alphas, radius) for g in profiles]),
        Estimate.of([curvature(g, alphas) for g in profiles]),
    )


def sharpness(profile: Profile, alphas: Sequence[float], radius: float) -> float:
    """max_{|α| ≤ r} g(α) − g(0)."""
    return max(_within(profile, alphas, radius)[1]) - profile[len(alphas) // 2]


def mean_rise(profile: Profile, alphas: Sequence[float], radius: float) -> float:
    """(1 / 2r) ∫_{−r}^{r} g(α) dα − g(0), by trapezoids."""
    places, losses = _within(profile, alphas, radius)
    return float(trapezoid(losses, places)) / (2 * radius) - profile[len(alphas) // 2]


def curvature(profile: Profile, alphas: Sequence[float]) -> float:
    """g''(0) from the points next to 0: (g(h) − 2 g(0) + g(−h)) / h²."""
    middle = len(alphas) // 2
    step = alphas[middle + 1]
    return (profile[middle + 1] - 2 * profile[middle] + profile[middle - 1]) / step**2


def _within(profile: Profile, alphas: Sequence[float], radius: float) -> tuple[list[float], list[float]]:
    """Every α inside the radius and its two ends, with the losses there; between points they lie on straight lines."""
    places = [-radius, *(alpha for alpha in alphas if abs(alpha) < radius), radius]
    losses: list[float] = numpy.interp(places, alphas, profile).tolist()
    return places, losses
