"""Measures of flatness: each is computed along every direction; mean and standard deviation are over directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.integrate import trapezoid

from steppe.results.statistics import mean_std

Profile = Sequence[float]


@dataclass(frozen=True)
class Estimate:
    """A mean over random draws; standard deviation and error are None for a single draw."""

    mean: float
    std: float | None
    error: float | None
    """The mean's standard error: std / √draws."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from one value for each draw; there must be at least one."""
        found = mean_std(values)
        assert found is not None
        return cls(found.mean, found.std, None if found.std is None else found.std / math.sqrt(len(values)))


@dataclass(frozen=True)
class Flatness:
    """The flatness of one task's loss around one network's weights."""

    loss: float
    """g(0), the same along every direction."""
    sharpness: Estimate
    mean_rise: Estimate
    curvature: Estimate


def measure_flatness(profiles: Sequence[Profile], alphas: Sequence[float], radius: float) -> Flatness:
    """Measure flatness from the profiles along all directions.

    Args:
        profiles: The losses along each direction.
        alphas: Where they were measured; symmetric, with 0 in the middle.
        radius: Sharpness and mean rise are taken over |α| ≤ radius.

    Returns:
        The loss at α = 0, and the estimate of each measure over the directions.
    """
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
    """(1 / 2r) ∫_{−r}^{r} g(α) dα − g(0), by the trapezoidal rule."""
    places, losses = _within(profile, alphas, radius)
    return float(trapezoid(losses, places)) / (2 * radius) - profile[len(alphas) // 2]


def curvature(profile: Profile, alphas: Sequence[float]) -> float:
    """g''(0) from the points next to 0: (g(h) − 2 g(0) + g(−h)) / h²."""
    middle = len(alphas) // 2
    step = alphas[middle + 1]
    return (profile[middle + 1] - 2 * profile[middle] + profile[middle - 1]) / step**2


def _within(profile: Profile, alphas: Sequence[float], radius: float) -> tuple[list[float], list[float]]:
    """Every α within the radius and its two ends, with the losses there, interpolated linearly."""
    places = [-radius, *(alpha for alpha in alphas if abs(alpha) < radius), radius]
    losses: list[float] = numpy.interp(places, alphas, profile).tolist()
    return places, losses
