"""Bases of one-hot inputs: how often each row of a table was looked up, in place of a matrix of one-hot vectors.

R Rᵀ is diagonal. The singular vectors of R are one-hot vectors, and the singular values are the square roots of the
counts. So UpdateGPM keeps the fewest rows that were looked up in a share ε of all cases, the most frequent ones first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steppe.projection.basis import Spectrum, running_sums, within_threshold
from steppe.projection.extend_basis import ExtendedBasis, new_directions
from steppe.projection.layers import ProjectedWeight


class RowCounts:
    """How often each row of a table was looked up. It stands in for a `basis.Representation`.

    Args:
        rows: The number of rows of the table.

    Example:
        >>> import torch
        >>> from steppe.projection.row_counts import RowCounts
        >>> counts = RowCounts(5)
        >>> counts.add(torch.tensor([4, 1, 4, 4]))
        >>> counts.leading(0.7).vectors, counts.leading(0.8).vectors
        (tensor([4]), tensor([4, 1]))
    """

    def __init__(self, rows: int) -> None:
        self._rows, self._counts = rows, torch.zeros(0, dtype=torch.float64, device="cpu")

    def add(self, indices: Tensor) -> None:
        """Add look-ups.

        Args:
            indices: The indices of the rows, (n,).
        """
        counts = torch.bincount(indices, minlength=self._rows).double()
        self._counts = counts if self._counts.numel() == 0 else self._counts + counts

    def add_call(self, weight: ProjectedWeight, layer: nn.Module, x: Tensor) -> None:
        """Add the look-ups of a call of a layer.

        Args:
            weight: The covered weight.
            layer: The layer that uses it.
            x: The input of the call.
        """
        self.add(weight.rule(layer, x))

    def is_finite(self) -> bool:
        """Counts always are."""
        return True

    def energy(self) -> Tensor:
        """‖R‖², (1,): the number of look-ups."""
        return self._counts.sum().reshape(1)

    def leading(self, threshold: float) -> Spectrum | None:
        """Select the fewest rows that hold a share ε of all look-ups.

        Args:
            threshold: ε.

        Returns:
            Singular values, (1, k), and the indices of rows, (k,); None if nothing was added.
        """
        if self._counts.numel() == 0:
            return None
        energy, rows = self._counts.sort(descending=True, stable=True)
        kept = within_threshold(running_sums(energy) - energy, energy, energy.sum(), threshold)
        return Spectrum(energy[kept].sqrt().unsqueeze(0), rows[kept])

    def extend(self, old: Tensor | None, threshold: float, *, first: bool) -> ExtendedBasis | None:
        """Extend a set of rows by what it misses, as `extend_basis` does.

        Args:
            old: The indices of the rows that are held, or None.
            threshold: The share of look-ups to hold (ε).
            first: Whether this is the first task, which leaves out the row that crosses the threshold.

        Returns:
            The indices of all rows to hold, the old ones first, and ‖Rᵀm_i‖, (1, k); None if nothing was added.
        """
        if self._counts.numel() == 0:
            return None
        old = self._counts.new_zeros(0, dtype=torch.int64) if old is None else old
        total, held = self._counts.sum(), self._counts[old]
        energy, rows = self._counts.index_fill(0, old, 0.0).sort(descending=True, stable=True)
        chosen = new_directions(held.sum() + running_sums(energy), energy, total, threshold, first=first)
        strengths = torch.cat([held, energy[chosen]]).sqrt()
        return ExtendedBasis(torch.cat([old, rows[chosen]]), strengths.unsqueeze(0))
