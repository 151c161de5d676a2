"""UpdateGPM's basis: the fewest leading left singular vectors of R that hold a share ε of its energy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from steppe.projection.layers import ProjectedWeight, convolution_patches
from steppe.projection.patches import patch_product

MAX_THRESHOLD = 1 - 1e-11
"""The largest useful threshold: above it, the extra directions are rounding noise."""

COARSE_THRESHOLD = 0.999
"""Up to this threshold, products may be computed in the precision of the inputs: the error is about a millionth."""

_FAINT = 1e-9
"""Up to `COARSE_THRESHOLD`, directions with less than this share of the strongest one's energy are dropped."""


class Spectrum(NamedTuple):
    """Left singular vectors, (groups, in, r), in descending order of their singular values, (groups, r)."""

    values: Tensor
    vectors: Tensor


def direction_mask(basis: Tensor) -> Tensor:
    """Which columns of a basis, (groups, in, k), are directions rather than padding, (groups, k)."""
    return basis.square().sum(1) > 0.5


class Representation:
    """The input vectors of one layer, as the columns of R, added in chunks.

    While there are fewer columns than rows, they are stored; from then on only their Gram matrix R Rᵀ is. Memory is
    therefore bounded by in × in, however many columns (image patches) there are.

    A Gram matrix squares the condition number, and thresholds go up to 1 − 1e-11, so computations are in float64. Only
    where the threshold is low enough for rounding not to matter are products and eigenvectors in the input precision.

    Args:
        threshold: The threshold ε that the basis will be selected with.

    Example:
        >>> import torch
        >>> from steppe.projection.basis import Representation, select_leading
        >>> representation = Representation()
        >>> representation.add(torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]))  # energies 9 and 1
        >>> select_leading(representation.spectrum(), 0.9).values
        tensor([[3.]], dtype=torch.float64)
    """

    def __init__(self, threshold: float = 1.0) -> None:
        self._columns: list[Tensor] = []
        self._gram: Tensor | None = None
        self._count = 0
        self._precise = threshold > COARSE_THRESHOLD
        self._dtype = torch.float64

    @classmethod
    def of_gram(cls, gram: Tensor) -> Representation:
        """A representation from R Rᵀ; only a rough spectrum, in the precision of the matrix, can be expected of it.

        Args:
            gram: R Rᵀ, (groups, in, in).

        Returns:
            The representation.
        """
        representation = cls(0.0)
        representation._gram, representation._dtype = gram, gram.dtype
        return representation

    def add(self, columns: Tensor) -> None:
        """Add columns.

        Args:
            columns: The columns as rows, (groups, n, in).
        """
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
        """Add the input vectors of a call of a layer.

        Args:
            weight: The covered weight.
            layer: The layer that uses it.
            x: The input of the call.
        """
        if weight.rule is convolution_patches:
            result = patch_product(layer, x.double() if self._precise else x)
            if result is not None and (self._gram is not None or result[1] >= result[0].shape[-1]):
                self._add_product(*result, x.dtype)
                return
        self.add(weight.rule(layer, x))

    def _add_product(self, product: Tensor, count: int, dtype: torch.dtype) -> None:
        """Add columns, at least as many as R has rows, by their product R Rᵀ."""
        self._count += count
        self._dtype = dtype
        product = product.double()
        if self._columns:
            columns = torch.cat(self._columns, dim=1)
            product += columns.mT @ columns
            self._columns = []
        self._gram = product if self._gram is None else self._gram + product

    def is_finite(self) -> bool:
        """Whether R and its energy are finite in the precision that R is decomposed in."""
        if self._gram is None and not self._columns:
            return True
        rough = self._gram is not None and not self._precise
        return bool(torch.isfinite(self.energy().to(self._dtype if rough else torch.float64)).all())

    def spectrum(self) -> Spectrum | None:
        """The singular values and left singular vectors of R.

        Returns:
            The spectrum, or None if nothing was added.
        """
        if self._gram is not None:
            energy, vectors = torch.linalg.eigh(
                self._gram if self._precise else self._gram.to(self._dtype)
            )  # ascending
            return Spectrum(energy.clamp(min=0).sqrt().flip(-1), vectors.flip(-1))
        if not self._columns:
            return None
        columns = torch.cat(self._columns, dim=1)
        if self._precise:
            vectors, values, _ = torch.linalg.svd(columns.mT, full_matrices=False)
            return Spectrum(values, vectors)
        # By RᵀR, the smaller product, in double precision: u_i = R v_i / σ_i.
        energy, right = (part.flip(-1) for part in torch.linalg.eigh(columns @ columns.mT))
        values = (energy * (energy > _FAINT * energy[..., :1])).clamp(min=0).sqrt()
        scale = torch.where(values > 0, 1 / values, 0)
        return Spectrum(values, columns.mT @ (right * scale.unsqueeze(-2)))

    def leading(self, threshold: float) -> Spectrum | None:
        """Select the fewest leading singular vectors that hold a share of R's energy.

        Args:
            threshold: The share (ε).

        Returns:
            What `select_leading` returns, or None if nothing was added.
        """
        spectrum = self.spectrum()
        return None if spectrum is None else select_leading(spectrum, threshold)

    def energy(self) -> Tensor:
        """‖R‖² of each group."""
        if self._gram is not None:
            return self._gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        return torch.cat(self._columns, dim=1).square().sum((-2, -1))

    def strengths_along(self, basis: Tensor) -> Tensor:
        """‖Rᵀm_i‖, (groups, k): the length of R along each direction of a basis, (groups, in, k)."""
        if self._gram is not None:
            return (basis * (self._gram @ basis)).sum(1).clamp(min=0).sqrt()
        return (torch.cat(self._columns, dim=1) @ basis).square().sum(1).sqrt()

    def project_out(self, basis: Tensor) -> Representation:
        """What an orthonormal basis misses: R̂ = R − M Mᵀ R, or R̂ R̂ᵀ = (I − M Mᵀ) R Rᵀ (I − M Mᵀ).

        Args:
            basis: M, (groups, in, k).

        Returns:
            R̂.
        """
        residual = Representation()
        residual._count, residual._precise, residual._dtype = self._count, self._precise, self._dtype
        if self._gram is not None:
            half = self._gram - basis @ (basis.mT @ self._gram)
            residual._gram = half - (half @ basis) @ basis.mT
        elif self._columns:
            columns = torch.cat(self._columns, dim=1)
            residual._columns = [columns - (columns @ basis) @ basis.mT]
        return residual


def running_sums(energy: Tensor) -> Tensor:
    """Cumulative sums over the last dimension."""
    # On the CPU: on CUDA, `cumsum` is not deterministic, and fails under `torch.use_deterministic_algorithms`.
    return energy.cpu().cumsum(-1).to(energy.device)


def within_threshold(reached: Tensor, energy: Tensor, total: Tensor, threshold: float) -> Tensor:
    """Whether directions are needed to hold a share of an energy: those that have any, until enough is reached.

    Args:
        reached: The energy that is held before a direction is added.
        energy: The energy of each direction.
        total: The whole energy.
        threshold: The share to hold (ε).

    Returns:
        Whether each direction is needed; none if all energies are 0.
    """
    return (reached < min(threshold, MAX_THRESHOLD) * total) & (energy > 0)


def select_leading(spectrum: Spectrum, threshold: float) -> Spectrum:
    """Select the fewest leading vectors with ‖R_k‖² ≥ threshold · ‖R‖², including the one that crosses the threshold.

    Args:
        spectrum: The spectrum of R.
        threshold: The share of energy to hold (ε).

    Returns:
        As many vectors as the group with the most needs; those that a group does not need are zero.
    """
    energy = spectrum.values.square()
    total = energy.sum(-1, keepdim=True)
    needed = within_threshold(running_sums(energy) - energy, energy, total, threshold)
    rank = int(needed.sum(-1).max())
    kept = needed[:, :rank]
    return Spectrum(spectrum.values[:, :rank] * kept, spectrum.vectors[:, :, :rank] * kept.unsqueeze(1))
