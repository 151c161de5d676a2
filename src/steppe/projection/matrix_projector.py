"""The projector of a fixed λ that holds P = M diag(λ) Mᵀ itself: less work where M has most of the directions."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from torch import Tensor

from steppe.fast.factored import FactoredGrad
from steppe.fast.matmul import product


@dataclass(frozen=True)
class MatrixProjector:
    """P, applied to gradients; `SoftProjector` with the same P gives the same but for rounding.

    What is called coordinates there is G P here, from which both components follow.

    Args:
        matrix: P, (groups, in, in).
        importance: λ, (groups, k), of the directions; 0 for those without energy.

    Example:
        >>> import torch
        >>> from steppe.projection.matrix_projector import MatrixProjector
        >>> projector = MatrixProjector(torch.diag(torch.tensor([1.0, 0.5, 0.0]))[None], torch.tensor([[1.0, 0.5]]))
        >>> projector.project_out(torch.ones(1, 3))
        tensor([[0.0000, 0.5000, 1.0000]])
    """

    matrix: Tensor
    importance: Tensor
    rows: None = None
    """No further product leads from G P back to the inputs."""

    @functools.cached_property
    def columns(self) -> Tensor:
        """P as a matrix, (in, in), for a layer without groups."""
        return self.matrix[0]

    @property
    def rank(self) -> int:
        """The number of directions with λ above 0, over all groups."""
        return int((self.importance > 0).sum())

    @property
    def max_rank(self) -> int:
        """The largest possible number of directions, over all groups."""
        return self.matrix.shape[0] * self.matrix.shape[1]

    @property
    def active_importance(self) -> Tensor:
        """The importances of the directions, without those that are 0."""
        return self.importance[self.importance > 0]

    def coordinates(self, gradient: Tensor | FactoredGrad) -> Tensor | FactoredGrad:
        """G P, factored if G is.

        Args:
            gradient: G, dense or factored.

        Returns:
            G P, in the shape of G.
        """
        if isinstance(gradient, FactoredGrad):
            return gradient @ self.columns
        groups, width, _ = self.matrix.shape
        if groups > 1:
            return (gradient.reshape(groups, -1, width) @ self.matrix).reshape(gradient.shape)
        return product(gradient.reshape(-1, width), self.columns).reshape(gradient.shape)

    def project_onto(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None
    ) -> Tensor | FactoredGrad:
        """The component of a gradient within the memory: G P.

        Args:
            gradient: G, dense or factored.
            coordinates: G P, if already known.

        Returns:
            The component, factored if G is.
        """
        return self.coordinates(gradient) if coordinates is None else coordinates

    def project_out(
        self, gradient: Tensor | FactoredGrad, coordinates: Tensor | FactoredGrad | None = None
    ) -> Tensor | FactoredGrad:
        """The component of a gradient outside the memory: G − G P.

        Args:
            gradient: G, dense or factored.
            coordinates: G P, if already known.

        Returns:
            The component, factored if G is.
        """
        within = self.project_onto(gradient, coordinates)
        if isinstance(gradient, FactoredGrad):
            assert isinstance(within, FactoredGrad)
            return FactoredGrad(gradient.left, gradient.right - within.right)
        assert isinstance(within, Tensor)
        return gradient - within

    def with_importance(self, importance: Tensor) -> MatrixProjector:
        """Replace the importances, which are only recorded: P stays.

        Args:
            importance: λ, (groups, k).

        Returns:
            A projector with the same P.
        """
        return replace(self, importance=importance)

    @property
    def nbytes(self) -> int:
        """The memory of P."""
        return self.matrix.nbytes

    def state_dict(self) -> list[Tensor | str]:
        """P and λ, marked as such."""
        return [self.matrix, self.importance, MATRIX]


MATRIX = "matrix"
"""Marks a saved P; a saved basis has no mark."""


def check_matrix(matrix: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return a saved P and its λ.

    Args:
        matrix: P.
        importance: λ.

    Returns:
        Both.

    Raises:
        ValueError: If their shapes do not match.
    """
    if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2] or importance.shape[:1] != matrix.shape[:1]:
        raise ValueError("a projector does not match its importances")
    return matrix, importance


def matrix_of(basis: Tensor, importance: Tensor) -> Tensor:
    """P = M diag(λ) Mᵀ.

    Args:
        basis: M, (groups, in, k).
        importance: λ, (groups, k).

    Returns:
        P, (groups, in, in).
    """
    return (basis * importance.unsqueeze(1)) @ basis.mT
