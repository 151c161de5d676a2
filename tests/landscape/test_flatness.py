"""Measures of flatness on curves for which they are known."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import UsageError
from steppe.landscape.flatness import Estimate, curvature, mean_rise, measure_flatness, sharpness
from steppe.landscape.settings import LandscapeSettings

ALPHAS = LandscapeSettings().alphas
NUMBERS = st.floats(-100, 100)


@given(c=NUMBERS, b=NUMBERS, a=st.floats(0, 100), places=st.integers(1, 25))
def test_a_parabola(c: float, b: float, a: float, places: int) -> None:
    """g = c + b α + a α²/2: sharpness |b| r + a r²/2, curvature a, mean rise a r²/6 plus the trapezoidal error."""
    g = [c + b * alpha + a * alpha**2 / 2 for alpha in ALPHAS]
    r, h = ALPHAS[25 + places], 0.04
    assert sharpness(g, ALPHAS, r) == pytest.approx(abs(b) * r + a * r**2 / 2, abs=1e-9)
    assert curvature(g, ALPHAS) == pytest.approx(a, abs=1e-9)
    assert mean_rise(g, ALPHAS, r) == pytest.approx(a * r**2 / 6 + a * h**2 / 12, abs=1e-9)


@given(g=st.lists(NUMBERS, min_size=51, max_size=51), near=st.integers(1, 25), far=st.integers(1, 25))
def test_sharpness_is_never_negative_and_grows_with_the_radius(g: list[float], near: int, far: int) -> None:
    near, far = sorted((near, far))
    assert 0 <= sharpness(g, ALPHAS, ALPHAS[25 + near]) <= sharpness(g, ALPHAS, ALPHAS[25 + far])


def test_values_beyond_the_radius_do_not_count() -> None:
    g = [0.0] * 51
    g[25 + 6] = 5.0  # at α = 0.24
    assert sharpness(g, ALPHAS, 0.2) == 0
    assert sharpness(g, ALPHAS, 0.24) == 5
    assert mean_rise(g, ALPHAS, 0.2) == 0


def test_radius_between_two_points_is_interpolated() -> None:
    g = [abs(alpha) for alpha in ALPHAS]
    assert sharpness(g, ALPHAS, 0.21) == pytest.approx(0.21)
    assert mean_rise(g, ALPHAS, 0.21) == pytest.approx(0.105)


def test_over_directions() -> None:
    curves = [[slope * alpha**2 for alpha in ALPHAS] for slope in (1.0, 2.0, 6.0)]
    found = measure_flatness(curves, ALPHAS, 0.4)
    rises = [0.16, 0.32, 0.96]
    assert found.loss == 0
    assert found.sharpness.mean == pytest.approx(0.48)
    assert found.sharpness.std == pytest.approx(statistics.stdev(rises))
    assert found.sharpness.error == pytest.approx(statistics.stdev(rises) / math.sqrt(3))
    assert found.curvature.mean == pytest.approx(6.0)


def test_one_direction_has_no_spread() -> None:
    assert Estimate.of([2.0]) == Estimate(2.0, None, None)


@given(points=st.integers(1, 100), reach=st.floats(1e-3, 1e3))
def test_alphas_are_symmetric_around_zero(points: int, reach: float) -> None:
    alphas = LandscapeSettings(points=2 * points + 1, range=reach, radius=reach).alphas
    assert len(alphas) == 2 * points + 1
    assert alphas[points] == 0
    assert alphas[-1] == reach
    assert alphas == [-alpha for alpha in reversed(alphas)]
    assert sharpness([alpha * alpha for alpha in alphas], alphas, reach) == pytest.approx(alphas[-1] ** 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"points": 50}, "odd"),
        ({"points": 1}, "at least 3"),
        ({"radius": 1.5}, "range"),
        ({"radius": 0.01}, "one step"),
        ({"range": 0}, "range = 0.0 is out of range; it must be at least 1e-30"),
        ({"range": 1e-200, "radius": 1e-200}, "range = 1e-200 is out of range; it must be at least 1e-30"),
        ({"range": 1e300}, r"at most 1e\+30"),
        ({"sigma": 1e-170}, "sigma = 1e-170 is out of range; it must be at least 1e-30"),
        ({"sigma": 1e39}, r"at most 1e\+30"),
        ({"samples": 0}, "at least 1"),
        ({"delta": 1}, "below 1"),
        ({"sigma": float("inf")}, "sigma"),
    ],
)
def test_settings_out_of_range(changes: dict[str, float], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        LandscapeSettings.from_mapping(changes)
