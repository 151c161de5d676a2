"""UpdateGPM's criterion: the fewest leading left singular vectors of R that hold a share ε of its energy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from steppe.projection.layers import ProjectedWeight, convolution_patches
from steppe.projection.patches import patch_product

MAX_THRESHOLD = 1 - 1e-11
"""The largest threshold: beyond it directions would be kept that are only rounding noise."""


COARSE_THRESHOLD = 0.999
"""Up to this threshold the products of a chunk may be as coarse as its numbers: what they lose is a millionth."""


_FAINT = 1e-9
"""Share of the strongest direction's energy below which a direction counts as none, where that is precise enough."""


class Spectrum(NamedTuple):
    """Left singular vectors, (groups, in, r), by falling singular value, (groups, r)."""

    values: Tensor
    vectors: Tensor


def direction_mask(basis: Tensor) -> Tensor:
    """Which columns of a basis, (groups, in, k), are directions and which are padding, (groups, k)."""
    return basis.square().sum(1) > 0.5


class Representation:
    """R of one layer, fed with columns in chunks.

    While the columns are fewer than the rows they are kept; from then on only their Gram matrix R Rᵀ is, so memory is
    bounded by in × in however many patches there are.

    A Gram matrix squares the condition number, and thresholds go up to 1 − 1e-11, so everything is in float64; but for
    products and eigenvectors where the threshold (given) leaves out so much that their rounding does not matter.
    """

    def __init__(self, threshold: float = 1.0) -> None:
        self._columns: list[Tensor] = []
        self._gram: Tensor | None = None
        self._count = 0
        self._precise = threshold > COARSE_THRESHOLD
        self._dtype = torch.float64

    def add(self, columns: Tensor) -> None:
        """Take in more columns, given as rows: (groups, n, in)."""
        self._count += columns.shape[1]
        self._dtype = columns.dtype
        if self._precise:
            columns = columns.double()
        if self._gram is None:
            if self._columns or self._count < columns.shape[2]:
                columns = columns.double()
            self._columns.append(columns)
            if self._count < columns.shape[2]:
                return
            if len(self._columns) > 1:
                columns = torch.cat(self._columns, dim=1)
            self._columns = []
            self._gram = (columns.mT @ columns).double()
        else:
            self._gram += columns.mT @ columns

    def add_call(self, weight: ProjectedWeight, layer: nn.Module, x: Tensor) -> None:
        """Take in what a covered layer was called with."""
        if weight.rule is convolution_patches:
            found = patch_product(layer, x.double() if self._precise else x)
            if found is not None and (self._gram is not None or found[1] >= found[0].shape[-1]):
                self._add_product(*found, x.dtype)
                return
        self.add(weight.rule(layer, x))

    def _add_product(self, product: Tensor, count: int, dtype: torch.dtype) -> None:
        """Take in more columns, at least as many as there are rows, by their product R Rᵀ."""
        self._count += count
        self._dtype = dtype
        product = product.double()
        if self._columns:
            columns = torch.cat(self._columns, dim=1)
            product += columns.mT @ columns
            self._columns = []
        self._gram = product if self._gram is None else self._gram + product

    def is_finite(self) -> bool:
        """Whether R is, and its energy, in the numbers that it is decomposed in."""
        if self._gram is None and not self._columns:
            return True
        rough = self._gram is not None and not self._precise
        return bool(torch.isfinite(self.energy().to(self._dtype if rough else torch.float64)).all())

    def spectrum(self) -> Spectrum | None:
        """Singular values and left singular vectors of R; None if nothing was taken in."""
        if self._gram is not None:
            energy, vectors = torch.linalg.eigh(self._gram if self._precise else self._gram.to(self._dtype))  # rising
            return Spectrum(energy.clamp(min=0).sqrt().flip(-1), vectors.flip(-1))
        if not self._columns:
            return None
        columns = torch.cat(self._columns, dim=1)
        if self._precise:
            vectors, values, _ = torch.linalg.svd(columns.mT, full_matrices=False)
            return Spectrum(values, vectors)
        # RᵀR, the smaller product, in double precision: u_i = R v_i / σ_i.
        energy, right = (part.flip(-1) for part in torch.linalg.eigh(columns @ columns.mT))
        values = (energy * (energy > _FAINT * energy[..., :1])).clamp(min=0).sqrt()
        scale = torch.where(values > 0, 1 / values, 0)
        return Spectrum(values, columns.mT @ (right * scale.unsqueeze(-2)))

    def energy(self) -> Tensor:
        """‖R‖² of every group."""
        if self._gram is not None:
            return self._gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        return torch.cat(self._columns, dim=1).square().sum((-2, -1))

    def strengths_along(self, basis: Tensor) -> Tensor:
        """‖Rᵀm_i‖, (groups, k): how strongly R's columns point along each direction of a basis, (groups, in, k)."""
        if self._gram is not None:
            return (basis * (self._gram @ basis)).sum(1).clamp(min=0).sqrt()
        return (torch.cat(self._columns, dim=1) @ basis).square().sum(1).sqrt()

    def project_out(self, basis: Tensor) -> Representation:
        """R̂ = R − M Mᵀ R for orthonormal M, (groups, in, k): from the columns while they are kept, afterwards by
        R̂ R̂ᵀ = (I − M Mᵀ) R Rᵀ (I − M Mᵀ).
        """
        left = Representation()
        left._count, left._precise, left._dtype = self._count, self._precise, self._dtype
        if self._gram is not None:
            half = self._gram - basis @ (basis.mT @ self._gram)
            left._gram = half - (half @ basis) @ basis.mT
        elif self._columns:
            columns = torch.cat(self._columns, dim=1)
            left._columns = [columns - (columns @ basis) @ basis.mT]
        return left


def running_sums(energy: Tensor) -> Tensor:
    """Of the last dimension, added up on the CPU: torch has no way to do it on CUDA that always gives the same, and
    refuses it where only such are allowed.
    """
    return energy.cpu().cumsum(-1).to(energy.device)


def select_leading(spectrum: Spectrum, threshold: float) -> Spectrum:
    """The fewest leading vectors with ‖R_k‖² ≥ threshold · ‖R‖²; the one that crosses it is included.

    Groups may need different numbers: all are cut to the largest, and what a group does not need is set to zero.
    """
    energy = spectrum.values.square()
    total = energy.sum(-1, keepdim=True)
    held_before = running_sums(energy) - energy
    needed = (held_before < min(threshold, MAX_THRESHOLD) * total) & (energy > 0)  # an all-zero R needs nothing
    rank = int(needed.sum(-1).max())
    kept = needed[:, :rank]
    return Spectrum(spectrum.values[:, :rank] * kept, spectrum.vectors[:, :, :rank] * kept.unsqueeze(1))
