"""GPM's bases, which grow: what a task adds is only what the old basis misses of its representation.

The share of R's energy held by the old basis M and the first j left singular vectors of R̂ = R − M Mᵀ R is

    a_j = (‖R‖² − ‖R̂‖² + σ̂_1² + … + σ̂_j²) / ‖R‖².

The first task keeps the vectors with a_j < ε: the one that crosses the threshold is left out. Every later task appends
vectors while a_{j−1} < ε: the one that crosses is taken, and none is if the old basis holds enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steppe.projection.basis import MAX_THRESHOLD, Representation, direction_mask, running_sums


class ExtendedBasis(NamedTuple):
    """A basis after a task, (groups, in, k), in double precision, and ‖Rᵀm_i‖ for its directions, (groups, k).

    In every group the old directions come first, bit for bit, then the new ones, whose ‖Rᵀm_i‖ is their singular
    value, then zeros.
    """

    basis: Tensor
    strengths: Tensor


def extend_basis(
    representation: Representation, old: Tensor | None, threshold: float, *, first: bool
) -> ExtendedBasis | None:
    """The basis `old` with what the first or a later task adds; None if nothing was taken in."""
    missed = representation
    if old is not None:
        old = old.double()
        # Stored in the network's precision, the old basis is orthonormal only up to rounding. Made so anew, it leaves
        # an R̂ and new directions that are orthogonal to it however little R̂ is.
        missed = representation.project_out(torch.linalg.qr(old)[0] * direction_mask(old).unsqueeze(1))
    spectrum = missed.spectrum()
    if spectrum is None:
        return None
    values, vectors = (part.double() for part in spectrum)  # a rough one comes in the network's precision
    if old is None:
        old = vectors[:, :, :0]
    total = representation.energy().unsqueeze(-1)
    energy = values.square()
    with_it = total - missed.energy().unsqueeze(-1) + running_sums(energy)
    reached = with_it if first else with_it - energy
    chosen = (reached < min(threshold, MAX_THRESHOLD) * total) & (energy > 0)
    return _compact(
        ExtendedBasis(
            torch.cat([old, vectors * chosen.unsqueeze(1)], dim=-1),
            torch.cat([representation.strengths_along(old), values * chosen], dim=-1),
        )
    )


def _compact(growth: ExtendedBasis) -> ExtendedBasis:
    """Every group's directions before its padding, of which only what the fullest group needs is kept."""
    held = direction_mask(growth.basis)
    order = held.logical_not().byte().argsort(dim=-1, stable=True)[:, : int(held.sum(-1).max())]
    where = order.unsqueeze(1).expand(-1, growth.basis.shape[1], -1)
    return ExtendedBasis(growth.basis.gather(2, where), growth.strengths.gather(1, order))
