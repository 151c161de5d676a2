"""The terms of the paper's PAC-Bayes bound on the risk of all tasks, for Gaussian v (appendix, PAC Bayesian bound).

With w the weights after the last task, and v ~ N(0, σ²) in every weight,
    E_v L(old tasks, w + v)                             stability of the old tasks
  + L(new task, w)                                      sensitivity to the new one
  + E_v L(new task, w + v) − L(new task, w)             expected sharpness
  + 4 √((KL(w + v ‖ P) + ln(2n/δ)) / n)                 complexity, with n the new task's training samples.
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
    """A task's loss and error (a share from 0 to 1) at w, and their means over draws of w + v."""

    loss: float
    error: float
    noisy_loss: Estimate
    noisy_error: Estimate


def measure_noisy_loss(
    surroundings: LossProbe, weights: Mapping[str, Tensor], sigma: float, draws: int, seed: int
) -> NoisyLoss:
    """Measured on a task's samples, over this many draws of v."""
    measures = (cross_entropy, zero_one)  # a loss that is no number has an error all the same
    loss, error = surroundings.means(measures=measures)[0].tolist()
    found = [
        surroundings.means([gaussian_noise(weights, seed, number)], [(sigma,)], measures)[0].tolist()
        for number in range(draws)
    ]
    if not all(math.isfinite(each[0]) for each in ((loss, error), *found)):
        raise DivergedError(f"the loss is not finite with noise of sigma = {sigma:g}: give a smaller --sigma.")
    return NoisyLoss(loss, error, Estimate.of([each[0] for each in found]), Estimate.of([each[1] for each in found]))


@dataclass(frozen=True)
class BoundTerms:
    """The bound's terms for one kind of loss: the bound is their sum with the complexity."""

    stability: float
    sensitivity: float
    sharpness: float


@dataclass(frozen=True)
class Bound:
    """The whole bound after a task: its terms for the zero-one loss, which it holds for, and for cross-entropy, which
    it does not hold for but which landscapes are drawn of. Nobody sums them: for networks of common size the complexity
    alone is far above 2, from where on a sum says nothing.
    """

    error: BoundTerms
    loss: BoundTerms
    kl: float
    """To the prior N(0, σ²): ‖w‖² / 2σ²."""
    complexity: float
    kl_previous: float | None
    """To the prior N(w', σ²) around the weights w' before the new task, which did not see it either."""
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
    """Put together from what was measured on every task; several old tasks count as one, by their mean."""
    kl = gaussian_kl(weights, None, sigma)
    previous = None if before is None else gaussian_kl(weights, before, sigma)
    if not all(math.isfinite(each) for each in (kl, previous or 0.0)):
        raise DivergedError(f"the bound's KL is not finite with sigma = {sigma:g}: give a larger --sigma.")
    return Bound(
        BoundTerms(_mean([each.noisy_error.mean for each in old]), new.error, new.noisy_error.mean - new.error),
        BoundTerms(_mean([each.noisy_loss.mean for each in old]), new.loss, new.noisy_loss.mean - new.loss),
        kl,
        complexity(kl, samples, delta),
        previous,
        None if previous is None else complexity(previous, samples, delta),
    )


def gaussian_kl(weights: Mapping[str, Tensor], centre: Mapping[str, Tensor] | None, sigma: float) -> float:
    """KL(N(w, σ²) ‖ N(c, σ²)) = ‖w − c‖² / 2σ², c being 0 where none is given."""
    squares = torch.zeros((), dtype=torch.float64, device="cpu")
    for name, weight in weights.items():
        apart = weight.detach().double().cpu()
        squares += (apart if centre is None else apart - centre[name].detach().double().cpu()).square().sum()
    return float(squares) / sigma / (2 * sigma)  # σ² may be no number where σ is one


def complexity(kl: float, samples: int, delta: float) -> float:
    """4 √((KL + ln(2n/δ)) / n)."""
    return 4 * math.sqrt((kl + math.log(2 * samples) - math.log(delta)) / samples)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
