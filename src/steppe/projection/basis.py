"""UpdateGPM's criterion: the fewest leading left singular vectors of R that hold a share ε of its energy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Spectrum(NamedTuple):
    """Left singular vectors, (groups, in, r), by falling singular value, (groups, r)."""

    values: Tensor
    vectors: Tensor


class Representation:
    """R of one layer, fed with columns in chunks.

    While the columns are fewer than the rows they are kept; from then on only their Gram matrix R Rᵀ is, so memory is
    bounded by in × in however many patches there are. Float64 throughout: the Gram matrix squares the condition
    number, and thresholds go up to 1 - 1e-11.
    """

    def __init__(self) -> None:
        self._columns: list[Tensor] = []
        self._gram: Tensor | None = None
        self._count = 0

    def add(self, columns: Tensor) -> None:
        """Take in more columns, given as rows: (groups, n, in)."""
        columns = columns.double()
        self._count += columns.shape[1]
        if self._gram is None:
            self._columns.append(columns)
            if self._count < columns.shape[2]:
                return
            columns = torch.cat(self._columns, dim=1)
            self._columns = []
            self._gram = columns.mT @ columns
        else:
            self._gram += columns.mT @ columns

    def spectrum(self) -> Spectrum | None:
        """Singular values and left singular vectors of R; None if nothing was taken in."""
        if self._gram is not None:
            energy, vectors = torch.linalg.eigh(self._gram)  # rising
            return Spectrum(energy.clamp(min=0).sqrt().flip(-1), vectors.flip(-1))
        if not self._columns:
            return None
        vectors, values, _ = torch.linalg.svd(torch.cat(self._columns, dim=1).mT, full_matrices=False)
        return Spectrum(values, vectors)


def leading(spectrum: Spectrum, threshold: float) -> Spectrum:
    """The fewest leading vectors with ‖R_k‖² ≥ threshold · ‖R‖²; the one that crosses it is included.

    Groups may need different numbers: all are cut to the largest, and what a group does not need is set to zero.
    """
    energy = spectrum.values.square()
    total = energy.sum(-1, keepdim=True)
    held_before = energy.cumsum(-1) - energy
    needed = (held_before < threshold * total) & (energy > 0)  # an all-zero R needs nothing
    rank = int(needed.sum(-1).max())
    kept = needed[:, :rank]
    return Spectrum(spectrum.values[:, :rank] * kept, spectrum.vectors[:, :, :rank] * kept.unsqueeze(1))
