"""Random directions in weight space.

For a profile, d ~ N(0, 1) in every weight, then each filter (a row of the weight's (out, in) view) is scaled to the
norm of the same filter of w; parameters of one dimension (biases, scales and shifts) stay where they are. For the
bound, v ~ N(0, 1) in every parameter, unscaled.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from steppe.seeding import Streams
from steppe.types import Direction


def direction(weights: Mapping[str, Tensor], seed: int, number: int) -> Direction:
    """The filter-normalised direction of this number.

    What is drawn depends on the seed and the number alone, what it is scaled to on the weights: the networks of one
    run, and of runs to be compared, are looked at along the same draws.
    """
    return filter_normalised(weights, _generator(seed, f"landscape direction {number}"))


@torch.no_grad()
def filter_normalised(weights: Mapping[str, Tensor], generator: torch.Generator) -> Direction:
    """d_lj ← d_lj / ‖d_lj‖ · ‖w_lj‖ for every filter j of every layer l."""
    found = {}
    for name, weight in weights.items():
        if weight.ndim < 2:
            found[name] = torch.zeros_like(weight)
            continue
        drawn = _normal(weight, generator).flatten(1)
        norms = torch.linalg.vector_norm(weight.flatten(1), dim=1, keepdim=True)
        lengths = torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
        found[name] = drawn.mul_(norms / lengths.clamp_(min=torch.finfo(drawn.dtype).tiny)).view_as(weight)
    return found


def noise(weights: Mapping[str, Tensor], seed: int, number: int) -> Direction:
    """The draw of this number of a standard normal in every parameter."""
    generator = _generator(seed, f"landscape noise {number}")
    return {name: _normal(weight, generator) for name, weight in weights.items()}


def _normal(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that every device gets the same."""
    return torch.randn(weight.shape, dtype=weight.dtype, generator=generator, device="cpu").to(weight.device)


def _generator(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(Streams(seed).derived(purpose))
