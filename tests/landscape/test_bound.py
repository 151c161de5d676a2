"""The bound's terms against closed forms, numerical integration, and explicit sums."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_models import OWN, bright
from reference_landscape import bowl, loss_at, moved, standing
from scipy.integrate import quad
from scipy.stats import norm

from steppe.errors import DivergedError
from steppe.landscape.bound import NoisyLoss, complexity, compute_bound, gaussian_kl, measure_noisy_loss
from steppe.landscape.directions import gaussian_noise
from steppe.landscape.flatness import Estimate
from steppe.landscape.profile import LossProbe


def test_expected_loss_of_a_parabola() -> None:
    """E q(w + v) = q(w) + σ² tr(A) / 2."""
    model, matrix = bowl(torch.Generator().manual_seed(1))
    network, batch = standing(model, torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    found = measure_noisy_loss(LossProbe(network, batch), network.trainable, 0.5, 1000, seed=0)
    w = model.weight.detach().reshape(-1)
    start = 1 + float(w @ matrix @ w) / 2
    assert found.loss == pytest.approx(start)
    expected = start + 0.5**2 * float(matrix.trace()) / 2
    assert found.noisy_loss.error is not None
    assert abs(found.noisy_loss.mean - expected) < 4 * found.noisy_loss.error
    assert found.noisy_loss.error < 0.2 * (expected - start)  # otherwise the line above would say little


def test_expected_error_of_one_weight_by_integration() -> None:
    """Logits (0, w·1): class 1 is predicted if w + v > 0, with probability Φ(w / σ)."""
    model = torch.nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [0.3]]))
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    network, batch = standing(model, x, y)
    found = measure_noisy_loss(LossProbe(network, batch), network.trainable, 0.5, 1500, seed=0)
    spread = 0.5 * math.sqrt(2)  # of the difference of the two logits
    assert found.error == 0
    assert found.noisy_error.mean == pytest.approx(1 - norm.cdf(0.3 / spread), abs=0.04)
    integral, _ = quad(lambda z: norm.pdf(z, 0.3, spread) * math.log1p(math.exp(-z)), -10, 10)
    assert found.noisy_loss.mean == pytest.approx(integral, rel=0.04)


def test_draw_by_draw() -> None:
    x, y = bright(8)(30, 0)
    model = OWN["mlp"].build()
    network, batch = standing(model, x, y)
    found = measure_noisy_loss(LossProbe(network, batch), network.trainable, 0.2, 5, seed=7)
    draws = [gaussian_noise(network.trainable, 7, number) for number in range(5)]
    losses = [loss_at(model, x, y, [v], [0.2], None) for v in draws]
    errors = [float((moved(model, [v], [0.2])(x.double()).argmax(1) != y).double().mean()) for v in draws]
    assert found.noisy_loss.mean == pytest.approx(statistics.fmean(losses), rel=1e-5)
    assert found.noisy_loss.std == pytest.approx(statistics.stdev(losses), rel=1e-4)
    assert found.noisy_error.mean == pytest.approx(statistics.fmean(errors))


@given(seed=st.integers(0, 2**31), sigma=st.floats(0.01, 10))
def test_kl_of_gaussians(seed: int, sigma: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    w, c = ({"a": torch.randn(2, 3, generator=generator), "b": torch.randn(4, generator=generator)} for _ in "wc")

    def by_torch(centre: dict[str, torch.Tensor]) -> float:
        total = 0.0
        for name in w:
            here = torch.distributions.Normal(w[name].double(), sigma)
            total += float(
                torch.distributions.kl_divergence(here, torch.distributions.Normal(centre[name].double(), sigma)).sum()
            )
        return total

    assert gaussian_kl(w, c, sigma) == pytest.approx(by_torch(c), rel=1e-9)
    assert gaussian_kl(w, None, sigma) == pytest.approx(
        by_torch({name: torch.zeros_like(t) for name, t in w.items()}), rel=1e-9
    )
    assert gaussian_kl(w, w, sigma) == 0


def test_kl_by_integration() -> None:
    """In one dimension, by definition."""

    def integrand(z: float) -> float:
        return float(norm.pdf(z, 1.3, 0.7) * (norm.logpdf(z, 1.3, 0.7) - norm.logpdf(z, 0, 0.7)))

    integral, _ = quad(integrand, -8, 8)
    assert gaussian_kl({"w": torch.tensor([[1.3]], dtype=torch.float64)}, None, 0.7) == pytest.approx(
        integral, rel=1e-6
    )


@given(power=st.floats(-148, 30), w=st.floats(0.1, 100))
def test_kl_for_extreme_sigma(power: float, w: float) -> None:
    """Against the formula in exact fractions."""
    sigma = 10**power
    twin = Fraction(w) ** 2 / (2 * Fraction(sigma) ** 2)
    assert gaussian_kl({"w": torch.tensor([[w]], dtype=torch.float64)}, None, sigma) == pytest.approx(
        float(twin), rel=1e-12
    )


def test_non_finite_bound_is_an_error() -> None:
    still = NoisyLoss(0.0, 0.0, Estimate(0.0, None, None), Estimate(0.0, None, None))
    weights = {"w": torch.tensor([[3.0]])}
    for sigma, before in ((1e-156, None), (1e-170, weights), (1e-320, None)):
        with pytest.raises(DivergedError, match=r"KL divergence is not finite with sigma = .*; pass a larger --sigma"):
            compute_bound([still], still, weights, before, samples=10, sigma=sigma, delta=0.1)


@pytest.mark.parametrize("sigma", [1e25, 1e37])
def test_noise_that_makes_the_loss_infinite_is_an_error(sigma: float) -> None:
    network, batch = standing(OWN["mlp"].build(), *bright(8)(30, 0))
    with pytest.raises(DivergedError, match=r"with noise of sigma = 1e\+.*; pass a smaller --sigma"):
        measure_noisy_loss(LossProbe(network, batch), network.trainable, sigma, 3, seed=0)


@pytest.mark.parametrize("power", [1, 100, 307, 320])
def test_complexity_for_tiny_delta(power: int) -> None:
    """ln(2n/δ) from the logarithm of an integer."""
    twin = 4 * math.sqrt((5.0 + math.log(2 * 1000 * 10**power)) / 1000)
    assert complexity(5.0, 1000, float(f"1e-{power}")) == pytest.approx(twin, rel=1e-6)


def test_whole_bound() -> None:
    def measured(loss: float, error: float, noisy_loss: float, noisy_error: float) -> NoisyLoss:
        return NoisyLoss(loss, error, Estimate(noisy_loss, None, None), Estimate(noisy_error, None, None))

    old = [measured(0.1, 0.01, 0.4, 0.10), measured(0.2, 0.02, 0.6, 0.20)]
    new = measured(0.3, 0.05, 0.35, 0.08)
    weights, before = {"w": torch.tensor([[3.0, 4.0]])}, {"w": torch.tensor([[3.0, 3.0]])}
    found = compute_bound(old, new, weights, before, samples=1000, sigma=0.5, delta=0.1)
    assert (found.error.stability, found.error.sensitivity) == (pytest.approx(0.15), 0.05)
    assert found.error.sharpness == pytest.approx(0.03)
    assert (found.loss.stability, found.loss.sensitivity) == (pytest.approx(0.5), 0.3)
    assert found.loss.sharpness == pytest.approx(0.05)
    assert (found.kl, found.kl_previous) == (pytest.approx(25 / 0.5), pytest.approx(1 / 0.5))
    assert found.complexity == pytest.approx(4 * math.sqrt((50 + math.log(20000)) / 1000))
    assert found.complexity_previous == pytest.approx(4 * math.sqrt((2 + math.log(20000)) / 1000))
    assert compute_bound(old, new, weights, None, samples=1000, sigma=0.5, delta=0.1).complexity_previous is None


@given(kl=st.floats(0, 1e6), n=st.integers(1, 10**6), delta=st.floats(0.001, 0.999))
def test_complexity_falls_with_samples_and_grows_with_kl(kl: float, n: int, delta: float) -> None:
    assert complexity(kl, 2 * n, delta) < complexity(kl, n, delta) < complexity(kl + 1, n, delta)
