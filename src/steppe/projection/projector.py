"""The soft projector P = M diag(λ) Mᵀ of one layer. Its λ may be part of a row that a gradient memory moves."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.fast.factored import FactoredGrad
from steppe.fast.matmul import less_product, product
from steppe.projection.basis import direction_mask


@dataclass(frozen=True)
class SoftProjector:
    """Basis M, (groups, in, k), with orthonormal columns (zero where a group needs fewer), and importances λ,
    (groups, k).

    A gradient G has the weight's shape and is viewed as (groups, out / groups, in); a linear layer's may come as
    factors, and is then projected by its inputs.
    """

    basis: Tensor
    importance: Tensor

    @functools.cached_property
    def columns(self) -> Tensor:
        """The basis of a layer without groups as a matrix, (in, k)."""
        return self.basis[0]

    @functools.cached_property
    def rows(self) -> Tensor:
        """Its transpose, (k, in)."""
        return self.columns.t()

    @property
    def rank(self) -> int:
        """How many directions are held, over all groups."""
        return int(direction_mask(self.basis).sum())

    @property
    def max_rank(self) -> int:
        """How many directions there are to hold, over all groups."""
        return self.basis.shape[0] * self.basis.shape[1]

    @property
    def active_importance(self) -> Tensor:
        """The importances of the directions that are held, without padding."""
        return self.importance[direction_mask(self.basis)]

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        """G M: each row of G along each basis direction, (out, k), or (groups, out / groups, k) where there are groups;
        factors stay factors.
        """
        if isinstance(gradient, FactoredGrad):
            return gradient @ self.columns
        rows = self._rows(gradient)
        return rows @ self.basis if self._grouped else product(rows, self.columns)

    def project_onto(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None
    ) -> Tensor | FactoredGrad:
        """G M diag(λ) Mᵀ; G M may be given where it is known already; factors stay factors."""
        weighed = self._weighted_coordinates(gradient, coordinates)
        if isinstance(weighed, FactoredGrad):
            return weighed @ self.rows
        assert isinstance(gradient, Tensor)
        back = weighed @ self.basis.mT if self._grouped else product(weighed, self.rows)
        return back.reshape(gradient.shape)

    def project_out(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None
    ) -> Tensor | FactoredGrad:
        """G − G M diag(λ) Mᵀ; factors stay factors."""
        if isinstance(gradient, FactoredGrad):
            along = gradient @ self.columns if coordinates is None else coordinates
            assert isinstance(along, FactoredGrad)
            return FactoredGrad(gradient.left, less_product(gradient.right, along.right * self.importance, self.rows))
        if coordinates is not None and gradient.ndim == 2 and not self._grouped:  # the same without a detour
            assert isinstance(coordinates, Tensor)
            return less_product(gradient, coordinates * self.importance, self.rows)
        weighed = self._weighted_coordinates(gradient, coordinates)
        assert isinstance(weighed, Tensor)
        rows = self._rows(gradient)
        if self._grouped:
            return torch.baddbmm(rows, weighed, self.basis.mT, alpha=-1).reshape(gradient.shape)
        return less_product(rows, weighed, self.rows).reshape(gradient.shape)

    @property
    def _grouped(self) -> bool:
        return self.basis.shape[0] > 1

    def _rows(self, gradient: Tensor) -> Tensor:
        """G viewed as (out, in), or as (groups, out / groups, in)."""
        groups, width, _ = self.basis.shape
        return gradient.reshape(groups, -1, width) if groups > 1 else gradient.reshape(-1, width)

    def _weighted_coordinates(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None
    ) -> Tensor | FactoredGrad:
        """G M diag(λ)."""
        known = self.coordinates(gradient) if coordinates is None else coordinates
        return known * (self.importance.unsqueeze(1) if self._grouped else self.importance)

    def with_importance(self, importance: Tensor) -> SoftProjector:
        """The same basis with other importances."""
        changed = object.__new__(SoftProjector)
        changed.__dict__.update(self.__dict__, importance=importance)  # with the views it has made already
        return changed
