"""Projectors of weights that are not laid out as rows: transposed convolutions and tables, such as embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from steppe.fast.factored import FactoredGrad
from steppe.projection.projector import SoftProjector
from steppe.projection.rules.registry import Layout


@dataclass(frozen=True)
class TransposedProjector(SoftProjector):
    """The projector of a weight (in, out / groups, ...), such as that of a transposed convolution."""

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        """G M, as of the weight (out, in / groups, ...)."""
        return super().coordinates(self._turned(gradient))

    def project_onto(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None
    ) -> Tensor | FactoredGrad:
        """The component of a gradient within the memory."""
        known = self.coordinates(gradient) if coordinates is None else coordinates
        return self._turned_back(super().project_onto(self._turned(gradient), known), gradient)

    def project_out(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None
    ) -> Tensor | FactoredGrad:
        """The component of a gradient outside the memory."""
        known = self.coordinates(gradient) if coordinates is None else coordinates
        return self._turned_back(super().project_out(self._turned(gradient), known), gradient)

    def _turned(self, gradient: Tensor | FactoredGrad) -> Tensor:
        """(in, out / groups, ...) as (out, in / groups, ...)."""
        assert isinstance(gradient, Tensor)
        return gradient.reshape(self._groups, -1, *gradient.shape[1:]).transpose(1, 2).flatten(0, 1)

    def _turned_back(self, projected: Tensor | FactoredGrad, gradient: Tensor | FactoredGrad) -> Tensor:
        assert isinstance(projected, Tensor)
        assert isinstance(gradient, Tensor)
        return projected.view(self._groups, -1, *projected.shape[1:]).transpose(1, 2).reshape(gradient.shape)

    @property
    def _groups(self) -> int:
        return self.basis.shape[0]


@dataclass(frozen=True)
class RowProjector(SoftProjector):
    """The projector of a table, (in, out), whose inputs are one-hot: it projects rows of the table.

    Args:
        basis: The indices of the rows, (k,), in place of the one-hot vectors that they stand for.
        importance: λ, (1, k).
        rows_in_all: The number of rows of the table.

    Example:
        >>> import torch
        >>> from steppe.projection.layouts import RowProjector
        >>> projector = RowProjector(torch.tensor([2, 0]), torch.tensor([[1.0, 0.5]]), rows_in_all=3)
        >>> projector.project_out(torch.ones(3, 2))
        tensor([[0.5000, 0.5000],
                [1.0000, 1.0000],
                [0.0000, 0.0000]])
    """

    rows_in_all: int = field(kw_only=True)

    @property
    def rank(self) -> int:
        """The number of rows that are held."""
        return len(self.basis)

    @property
    def max_rank(self) -> int:
        """The number of rows of the table."""
        return self.rows_in_all

    @property
    def mask(self) -> Tensor:
        """Nothing is padding."""
        return torch.ones_like(self.importance, dtype=torch.bool)

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor:
        """The held rows, as columns: (out, k)."""
        assert isinstance(gradient, Tensor)
        return gradient.index_select(0, self.basis).t()

    def project_onto(self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None) -> Tensor:
        """The held rows times their importances, and zeros elsewhere."""
        assert isinstance(gradient, Tensor)
        return torch.zeros_like(gradient).index_add(0, self.basis, self._weighted_rows(gradient, coordinates))

    def project_out(self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None) -> Tensor:
        """The gradient, with the held rows times 1 − λ."""
        assert isinstance(gradient, Tensor)
        return gradient.index_add(0, self.basis, self._weighted_rows(gradient, coordinates), alpha=-1)

    def _weighted_rows(self, gradient: Tensor, coordinates: Tensor | FactoredGrad | None) -> Tensor:
        known = self.coordinates(gradient) if coordinates is None else coordinates
        assert isinstance(known, Tensor)
        return (known * self.importance).t()


def make_projector(layout: Layout, weight: Tensor, basis: Tensor, importance: Tensor) -> SoftProjector:
    """The projector of a weight.

    Args:
        layout: How the weight is viewed.
        weight: The weight, or a tensor like it.
        basis: The basis, (groups, in, k), or indices of rows of a table, (k,).
        importance: λ, (groups, k).

    Returns:
        The projector.

    Raises:
        ValueError: If basis and importances do not have these shapes.
    """
    if layout is Layout.TABLE:
        if basis.ndim != 1 or basis.dtype != torch.int64 or importance.shape != (1, len(basis)):
            raise ValueError("the rows of a table do not match their importances")
        if len(basis) and not 0 <= int(basis.min()) <= int(basis.max()) < len(weight):
            raise ValueError("a table does not have all the rows that are protected")
        return RowProjector(basis, importance, rows_in_all=len(weight))
    if basis.ndim != 3 or importance.shape != (basis.shape[0], basis.shape[2]):
        raise ValueError("a basis does not match its importances")
    return (TransposedProjector if layout is Layout.TRANSPOSED else SoftProjector)(basis, importance)
