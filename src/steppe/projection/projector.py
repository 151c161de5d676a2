"""The soft projector P = M diag(λ) Mᵀ of one weight."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from steppe.fast.factored import FactoredGrad
from steppe.fast.matmul import less_product, product
from steppe.projection.basis import direction_mask


@dataclass(frozen=True)
class SoftProjector:
    """P = M diag(λ) Mᵀ, applied to gradients without forming P.

    A gradient G has the shape of the weight and is viewed as (groups, out / groups, in). A linear layer's gradient may
    be factored; then only its inputs are projected, and the result is factored too.

    Args:
        basis: M, (groups, in, k), with orthonormal columns; zero columns pad groups that need fewer.
        importance: λ, (groups, k). It may be a view into the importances of a whole gradient memory.

    Example:
        >>> import torch
        >>> from steppe.projection.projector import SoftProjector
        >>> projector = SoftProjector(torch.eye(3)[None, :, :2], torch.tensor([[1.0, 0.5]]))
        >>> gradient = torch.ones(1, 3)
        >>> projector.project_onto(gradient)
        tensor([[1.0000, 0.5000, 0.0000]])
        >>> projector.project_out(gradient)
        tensor([[0.0000, 0.5000, 1.0000]])
    """

    basis: Tensor
    importance: Tensor

    @functools.cached_property
    def columns(self) -> Tensor:
        """M as a matrix, (in, k), for a layer without groups."""
        return self.basis[0]

    @functools.cached_property
    def rows(self) -> Tensor:
        """Mᵀ, (k, in), for a layer without groups."""
        return self.columns.t()

    @property
    def rank(self) -> int:
        """The number of directions, over all groups."""
        return int(self.mask.sum())

    @property
    def max_rank(self) -> int:
        """The largest possible number of directions, over all groups."""
        return self.basis.shape[0] * self.basis.shape[1]

    @property
    def mask(self) -> Tensor:
        """Which of the importances are those of directions rather than padding, (groups, k)."""
        return direction_mask(self.basis)

    @property
    def active_importance(self) -> Tensor:
        """The importances of the directions, without padding."""
        return self.importance[self.mask]

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        """G M: the coordinates of each row of G along the basis directions.

        Args:
            gradient: G, dense or factored.

        Returns:
            G M, (out, k), or (groups, out / groups, k) for a layer with groups; factored if G is.
        """
        if isinstance(gradient, FactoredGrad):
            return gradient @ self.columns
        rows = self._rows(gradient)
        return rows @ self.basis if self._grouped else product(rows, self.columns)

    def project_onto(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None
    ) -> Tensor | FactoredGrad:
        """The component of a gradient within the memory: G M diag(λ) Mᵀ.

        Args:
            gradient: G, dense or factored.
            coordinates: G M, if already known.

        Returns:
            The component, factored if G is.
        """
        weighed = self._weighted_coordinates(gradient, coordinates)
        if isinstance(weighed, FactoredGrad):
            return weighed @ self.rows
        assert isinstance(gradient, Tensor)
        back = weighed @ self.basis.mT if self._grouped else product(weighed, self.rows)
        return back.reshape(gradient.shape)

    def project_out(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None
    ) -> Tensor | FactoredGrad:
        """The component of a gradient outside the memory: G − G M diag(λ) Mᵀ.

        Args:
            gradient: G, dense or factored.
            coordinates: G M, if already known.

        Returns:
            The component, factored if G is.
        """
        if isinstance(gradient, FactoredGrad):
            along = gradient @ self.columns if coordinates is None else coordinates
            assert isinstance(along, FactoredGrad)
            return FactoredGrad(gradient.left, less_product(gradient.right, along.right * self.importance, self.rows))
        if coordinates is not None and gradient.ndim == 2 and not self._grouped:  # fewer calls
            assert isinstance(coordinates, Tensor)
            return less_product(gradient, coordinates * self.importance, self.rows)
        weighed = self._weighted_coordinates(gradient, coordinates)
        assert isinstance(weighed, Tensor)
        rows = self._rows(gradient)
        if self._grouped:
            return torch.baddbmm(rows, weighed, self.basis.mT, alpha=-1).reshape(gradient.shape)
        return less_product(rows, weighed, self.rows).reshape(gradient.shape)

    @property
    def nbytes(self) -> int:
        """The memory of the basis."""
        return self.basis.nbytes

    def state_dict(self) -> list[Tensor]:
        """M and λ."""
        return [self.basis, self.importance]

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

    def with_importance(self, importance: Tensor) -> Self:
        """Replace the importances.

        Args:
            importance: The new λ, (groups, k).

        Returns:
            A projector with the same basis.
        """
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, importance=importance)  # keeps the cached views
        return changed
