"""The gradients of many tasks as factors: g_τ = δ_τᵀX_τ for every layer, so that ⟨g_τ, g_σ⟩ never needs g_τ itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.fast.factored import FactoredGrad, Gradient, ParamDict


@dataclass(frozen=True)
class FactoredRows:
    """The matrix A whose rows are the tasks' gradients, scale_τ · δ_τᵀX_τ for each weight.

    A bias is a weight whose inputs are all 1.
    """

    parts: dict[str, FactoredGrad]
    """δ, (tasks, n, out), and X, (tasks, n, in), of each weight."""
    shapes: dict[str, torch.Size]
    """The shape of each weight."""
    unscaled_gram: Tensor
    """A Aᵀ with all scales 1."""
    scale: Tensor

    def clipped(self, norm: float) -> FactoredRows:
        """Each row scaled down to `norm` if it is longer; 0 means no clipping."""
        if norm == 0:
            return self
        lengths = self.unscaled_gram.diagonal().clamp(min=0).sqrt()
        return dataclasses.replace(self, scale=(norm / (lengths + 1e-6)).clamp(max=1.0))

    def products(self, gradient: Gradient) -> Tensor:
        """A g; cheapest if g is factored too."""
        sums = []
        for name, rows in self.parts.items():
            g = gradient[name]
            if isinstance(g, FactoredGrad):
                along = (rows.left @ g.left.T) * (rows.right @ g.right.T)
            else:
                along = (rows.left @ g.reshape(len(g), -1)) * rows.right
            sums.append(along.sum((1, 2)))
        return self.scale * torch.stack(sums).sum(0)

    def gram(self) -> Tensor:
        """A Aᵀ."""
        return self.scale.unsqueeze(1) * self.unscaled_gram * self.scale

    def combined(self, weights: Tensor) -> ParamDict:
        """Aᵀ v."""
        v = (weights * self.scale).view(-1, 1, 1)
        return {
            name: ((rows.left * v).flatten(0, 1).T @ rows.right.flatten(0, 1)).reshape(self.shapes[name])
            for name, rows in self.parts.items()
        }


def block_products(rows: FactoredGrad, kernel: Tensor | None = None) -> Tensor:
    """Compute ⟨δ_τᵀX_τ, δ_σᵀX_σ⟩ for all pairs of tasks.

    Args:
        rows: δ, (tasks, n, out), and X, (tasks, n, in).
        kernel: XXᵀ over the samples of all tasks, if already known.

    Returns:
        The products, (tasks, tasks).
    """
    tasks, count, outputs = rows.left.shape
    total, inputs = tasks * count, rows.right.shape[-1]
    if kernel is None and total**2 * (outputs + inputs) > 4 * (total + tasks**2) * outputs * inputs:
        g = (rows.left.mT @ rows.right).flatten(1)  # so many samples that the gradients themselves are cheaper
        return g @ g.T
    left, right = rows.left.flatten(0, 1), rows.right.flatten(0, 1)
    pairs = (left @ left.T) * (right @ right.T if kernel is None else kernel)
    return pairs.view(tasks, count, tasks, count).sum((1, 3))
