"""The terms of the paper's PAC-Bayes bound on the risk of all tasks, for Gaussian v (appendix, PAC Bayesian bound).

With w the weights after the last task and v ~ N(0, σ²) in every weight:
    E_v L(old tasks, w + v)                             stability of the old tasks
  + L(new task, w)                                      sensitivity to the new one
  + E_v L(new task, w + v) − L(new task, w)             expected sharpness
  + 4 √((KL(w + v ‖ P) + ln(2n/δ)) / n)                 complexity, with n training samples of the new task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.errors import DivergedError
from steppe.landscape.directions import gaussian_noise
from steppe.landscape.flatness import Estimate
from steppe.landscape.profile import LossProbe, cross_entropy, zero_one


@dataclass(frozen=True)
class NoisyLoss:
    """A task's loss and error rate (0 to 1) at w, and their means over draws of w + v."""

    loss: float
    error: float
    noisy_loss: Estimate
    noisy_error: Estimate


def measure_noisy_loss(
    probe: LossProbe, weights: Mapping[str, Tensor], sigma: float, draws: int, seed: int
) -> NoisyLoss:
    """Measure a task's loss and error rate with and without noise in the weights.

    Args:
        probe: The task's samples and the network.
        weights: The network's weights w.
        sigma: Standard deviation of the noise v.
        draws: Number of draws of v.
        seed: Seed of the draws.

    Returns:
        Loss and error rate at w, and their estimates over the draws at w + v.

    Raises:
        DivergedError: The loss is not finite.
    """
    measures = (cross_entropy, zero_one)  # the error is finite even if the loss is not
    loss, error = probe.means(measures=measures)[0].tolist()
    found = [
        probe.means([gaussian_noise(weights, seed, number)], [(sigma,)], measures)[0].tolist()
        for number in range(draws)
    ]
    if not all(math.isfinite(each[0]) for each in ((loss, error), *found)):
        raise DivergedError(f"the loss is not finite with noise of sigma = {sigma:g}; pass a smaller --sigma.")
    return NoisyLoss(loss, error, Estimate.of([each[0] for each in found]), Estimate.of([each[1] for each in found]))


@dataclass(frozen=True)
class BoundTerms:
    """The bound's terms for one kind of loss; the bound is their sum plus the complexity."""

    stability: float
    sensitivity: float
    sharpness: float


@dataclass(frozen=True)
class Bound:
    """The bound after a task.

    The terms are given for the zero-one loss, for which the bound holds, and for cross-entropy, which landscapes show.
    They are not summed: for networks of common size the complexity alone makes the bound vacuous.
    """

    error: BoundTerms
    loss: BoundTerms
    kl: float
    """To the prior N(0, σ²): ‖w‖² / 2σ²."""
    complexity: float
    kl_previous: float | None
    """To the prior N(w', σ²) around the weights w' before the new task, which have not seen it either."""
    complexity_previous: float | None


def compute_bound(
    old: Sequence[NoisyLoss],
    new: NoisyLoss,
    weights: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None,
    *,
    samples: int,
    sigma: float,
    delta: float,
) -> Bound:
    """Compute the bound from the losses measured on every task.

    Args:
        old: The old tasks; their mean counts as one task.
        new: The new task.
        weights: The weights after the new task.
        before: The weights before it; None if they were not kept.
        samples: Number of training samples of the new task.
        sigma: Standard deviation of the noise.
        delta: The bound holds with probability 1 - delta.

    Returns:
        The terms of the bound.

    Raises:
        DivergedError: The KL divergence is not finite.
    """
    kl = gaussian_kl(weights, None, sigma)
    previous = None if before is None else gaussian_kl(weights, before, sigma)
    if not all(math.isfinite(each) for each in (kl, previous or 0.0)):
        raise DivergedError(f"the bound's KL divergence is not finite with sigma = {sigma:g}; pass a larger --sigma.")
    return Bound(
        BoundTerms(_mean([each.noisy_error.mean for each in old]), new.error, new.noisy_error.mean - new.error),
        BoundTerms(_mean([each.noisy_loss.mean for each in old]), new.loss, new.noisy_loss.mean - new.loss),
        kl,
        complexity(kl, samples, delta),
        previous,
        None if previous is None else complexity(previous, samples, delta),
    )


def gaussian_kl(weights: Mapping[str, Tensor], centre: Mapping[str, Tensor] | None, sigma: float) -> float:
    """KL(N(w, σ²) ‖ N(c, σ²)) = ‖w − c‖² / 2σ²; c defaults to 0."""
    squares = torch.zeros((), dtype=torch.float64, device="cpu")
    for name, weight in weights.items():
        apart = weight.detach().double().cpu()
        squares += (apart if centre is None else apart - centre[name].detach().double().cpu()).square().sum()
    return float(squares) / sigma / (2 * sigma)  # σ² may underflow


def complexity(kl: float, samples: int, delta: float) -> float:
    """4 √((KL + ln(2n/δ)) / n)."""
    return 4 * math.sqrt((kl + math.log(2 * samples) - math.log(delta)) / samples)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
