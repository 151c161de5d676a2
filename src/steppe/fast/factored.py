"""Directions in weight space, and gradients that stay factored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from steppe.fast.matmul import product, times_transposed

ParamDict = dict[str, Tensor]
"""A vector in weight space: one tensor per trainable parameter, by the parameter's name."""


@dataclass(slots=True, eq=False)  # not frozen: every update makes many, and that trebles what making one costs
class FactoredGrad:
    """A matrix G = δᵀX that stays factored.

    The gradient of a linear layer has this form, with n the number of samples. If n is below `out`, multiplying G from
    the right is cheaper on X: G A = δᵀ(X A).

    Args:
        left: δ, (n, out).
        right: X, (n, in).

    Example:
        >>> g = FactoredGrad(torch.ones(2, 3), torch.ones(2, 4))
        >>> g.dense().shape, float(g.squared_norm())
        (torch.Size([3, 4]), 48.0)
    """

    left: Tensor
    right: Tensor

    def __matmul__(self, other: Tensor) -> FactoredGrad:
        return FactoredGrad(self.left, product(self.right, other))

    def __mul__(self, columns: Tensor) -> FactoredGrad:
        return FactoredGrad(self.left, self.right * columns)

    def to(self, dtype: torch.dtype) -> FactoredGrad:
        """The same in another dtype."""
        return FactoredGrad(self.left.to(dtype), self.right.to(dtype))

    def dense(self) -> Tensor:
        """G itself, (out, in)."""
        return product(self.left.t(), self.right)

    def squared_norm(self) -> Tensor:
        """‖G‖² = Σ (δδᵀ) ∘ (XXᵀ), without G; rounding may give a little less than 0."""
        left = self.left
        return product(left, left.t()).mul_(times_transposed(self.right, self.right)).sum()


Gradient = Mapping[str, Tensor | FactoredGrad]
"""A direction some of whose tensors are factored."""


def to_dense(g: Tensor | FactoredGrad) -> Tensor:
    """The matrix itself, multiplied out if it is factored."""
    return g.dense() if isinstance(g, FactoredGrad) else g


def columnwise_dot(some: Sequence[Tensor | FactoredGrad], other: Tensor | FactoredGrad) -> Tensor:
    """Compute Σ_rows A_ri B_ri, the dot products of columns of same index.

    Args:
        some: Matrices whose sum is A, each (out, k) or (groups, out / groups, k).
        other: B.

    Returns:
        The products, (groups, k).
    """
    factored = [one for one in some if isinstance(one, FactoredGrad)]
    if isinstance(other, FactoredGrad) and len(factored) == len(some):
        # Σ_nm (δ_n · δ'_m) X_ni X'_mi, over pairs of samples instead of rows.
        whole = factored[0] if len(factored) == 1 else _stacked(factored)
        return torch.mm(torch.mm(whole.left, other.left.t()), other.right).mul_(whole.right).sum(0, keepdim=True)
    total = to_dense(some[0])
    for one in some[1:]:
        total = total + to_dense(one)
    return (total * to_dense(other)).sum(-2).reshape(-1, total.shape[-1])


def mean_of(parts: Sequence[Tensor | FactoredGrad]) -> Tensor | FactoredGrad:
    """The mean of matrices of one shape; it stays factored if all are and that is smaller."""
    if share_inputs(parts):
        return FactoredGrad(torch.stack([part.left for part in parts]).mean(0), parts[0].right)
    factored = [part for part in parts if isinstance(part, FactoredGrad)]
    if len(factored) == len(parts) and sum(part.left.shape[0] for part in factored) < factored[0].left.shape[1]:
        whole = _stacked(factored)
        return FactoredGrad(whole.left.div_(len(parts)), whole.right)
    return torch.stack([to_dense(part) for part in parts]).mean(0)


def share_inputs(parts: Sequence[Tensor | FactoredGrad]) -> TypeGuard[Sequence[FactoredGrad]]:
    """Whether all are factored with the same right factor."""
    first = parts[0]
    return isinstance(first, FactoredGrad) and all(
        isinstance(part, FactoredGrad) and part.right is first.right for part in parts
    )


def _stacked(parts: Sequence[FactoredGrad]) -> FactoredGrad:
    """The sum of factored matrices."""
    return FactoredGrad(torch.cat([part.left for part in parts]), torch.cat([part.right for part in parts]))
