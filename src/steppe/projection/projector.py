"""The soft projector P = M diag(λ) Mᵀ of one layer, as a value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.projection.basis import directions
from steppe.types import Outer


@dataclass(frozen=True)
class SoftProjector:
    """Basis M, (groups, in, k), with orthonormal columns (zero where a group needs fewer), and importances λ,
    (groups, k).

    A gradient G has the weight's shape and is viewed as (groups, out / groups, in); a linear layer's may come as
    factors, and is then projected by its inputs.
    """

    basis: Tensor
    importance: Tensor

    @property
    def rank(self) -> int:
        """How many directions are held, over all groups."""
        return int(directions(self.basis).sum())

    @property
    def size(self) -> int:
        """How many directions there are to hold, over all groups."""
        return self.basis.shape[0] * self.basis.shape[1]

    @property
    def held(self) -> Tensor:
        """The importances of the directions that are held, without padding."""
        return self.importance[directions(self.basis)]

    def coordinates(self, gradient: Tensor | Outer) -> Tensor | Outer:
        """G M: each row of G along each basis direction; factors stay factors."""
        if isinstance(gradient, Outer):
            return gradient @ self.basis[0]
        return self._rows(gradient) @ self.basis

    def within(self, gradient: Tensor | Outer, coordinates: Tensor | Outer | None = None) -> Tensor:
        """G M diag(λ) Mᵀ; G M may be given where it is known already."""
        weighed = self._weighed(gradient, coordinates)
        if isinstance(weighed, Outer):
            return (weighed @ self.basis[0].T).dense()
        assert isinstance(gradient, Tensor)
        return (weighed @ self.basis.mT).reshape(gradient.shape)

    def outside(self, gradient: Tensor | Outer, coordinates: Tensor | Outer | None = None) -> Tensor:
        """G − G M diag(λ) Mᵀ."""
        weighed = self._weighed(gradient, coordinates)
        if isinstance(weighed, Outer):
            assert isinstance(gradient, Outer)
            return Outer(gradient.left, torch.addmm(gradient.right, weighed.right, self.basis[0].T, alpha=-1)).dense()
        assert isinstance(gradient, Tensor)
        return torch.baddbmm(self._rows(gradient), weighed, self.basis.mT, alpha=-1).reshape(gradient.shape)

    def _rows(self, gradient: Tensor) -> Tensor:
        """G viewed as (groups, out / groups, in)."""
        groups, width, _ = self.basis.shape
        return gradient.reshape(groups, -1, width)

    def _weighed(self, gradient: Tensor | Outer, coordinates: Tensor | Outer | None) -> Tensor | Outer:
        """G M diag(λ)."""
        known = self.coordinates(gradient) if coordinates is None else coordinates
        return known * (self.importance[0] if isinstance(known, Outer) else self.importance.unsqueeze(1))

    def with_importance(self, importance: Tensor) -> SoftProjector:
        """The same basis with other importances."""
        return dataclasses.replace(self, importance=importance)
