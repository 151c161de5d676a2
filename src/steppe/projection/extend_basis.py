"""GPM's growing bases: a task adds only what the old basis misses of its representation R.

The share of R's energy held by the old basis M and the first j left singular vectors of R̂ = R − M Mᵀ R is

    a_j = (‖R‖² − ‖R̂‖² + σ̂_1² + … + σ̂_j²) / ‖R‖².

The first task keeps the vectors with a_j < ε, so it leaves out the one that crosses the threshold. Every later task
appends vectors while a_{j−1} < ε, so it includes the one that crosses, and none if the old basis already holds enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steppe.projection.basis import Representation, direction_mask, running_sums, within_threshold


class ExtendedBasis(NamedTuple):
    """A basis after a task, (groups, in, k), in double precision, and ‖Rᵀm_i‖ for its directions, (groups, k).

    In every group, the old directions come first, unchanged to the bit, then the new ones, whose ‖Rᵀm_i‖ are their
    singular values, then zeros.
    """

    basis: Tensor
    strengths: Tensor


def extend_basis(
    representation: Representation, old: Tensor | None, threshold: float, *, first: bool
) -> ExtendedBasis | None:
    """Extend a basis by what it misses of a representation.

    Args:
        representation: R of the task.
        old: The old basis, or None.
        threshold: The share of R's energy to hold (ε).
        first: Whether this is the first task, which leaves out the direction that crosses the threshold.

    Returns:
        The extended basis, or None if R is empty.
    """
    missed = representation
    if old is not None:
        old = old.double()
        # The stored basis is orthonormal only up to the network's precision. Orthonormalized again, it leaves new
        # directions that are orthogonal to it, however small R̂ is.
        missed = representation.project_out(torch.linalg.qr(old)[0] * direction_mask(old).unsqueeze(1))
    spectrum = missed.spectrum()
    if spectrum is None:
        return None
    values, vectors = (part.double() for part in spectrum)  # a coarse one is in the network's precision
    if old is None:
        old = vectors[:, :, :0]
    total = representation.energy().unsqueeze(-1)
    energy = values.square()
    after = total - missed.energy().unsqueeze(-1) + running_sums(energy)  # a_j ‖R‖²
    chosen = new_directions(after, energy, total, threshold, first=first)
    return _compact(
        ExtendedBasis(
            torch.cat([old, vectors * chosen.unsqueeze(1)], dim=-1),
            torch.cat([representation.strengths_along(old), values * chosen], dim=-1),
        )
    )


def new_directions(after: Tensor, energy: Tensor, total: Tensor, threshold: float, *, first: bool) -> Tensor:
    """Choose the new directions.

    Args:
        after: a_j ‖R‖², the energy held with the first j new directions.
        energy: σ̂_j², the energy of each.
        total: ‖R‖².
        threshold: The share of energy to hold (ε).
        first: Whether this is the first task, which leaves out the direction that crosses the threshold.

    Returns:
        Whether each is chosen.
    """
    return within_threshold(after if first else after - energy, energy, total, threshold)


def _compact(growth: ExtendedBasis) -> ExtendedBasis:
    """Move each group's padding behind its directions, and drop the columns that are padding in all groups."""
    held = direction_mask(growth.basis)
    order = held.logical_not().byte().argsort(dim=-1, stable=True)[:, : int(held.sum(-1).max())]
    where = order.unsqueeze(1).expand(-1, growth.basis.shape[1], -1)
    return ExtendedBasis(growth.basis.gather(2, where), growth.strengths.gather(1, order))
