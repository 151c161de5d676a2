"""Importance rules: how λ starts a task, and how an update changes it (docs/concepts.md: soft projection, importances).

`Ones` keeps λ = 1. `Sigmoid` is the paper's rule, literally; in practice it is inert, since σ(10·λ) returns to 0.99995
after any step of the paper's size. `Spectral` and `Ridge` fix λ for each task, from the singular values and from their
squares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from steppe.tensors.clipping import clip_ratio, clip_ratio_tensor


class ImportanceRule(Protocol):
    """How the basis directions are weighted by their importances λ."""

    @property
    def dynamic(self) -> bool:
        """Whether updates change λ; if not, its gradient is never computed."""
        ...

    def initial(self, singular_values: Tensor) -> Tensor:
        """λ at the start of a task.

        Args:
            singular_values: Those of the basis directions, (groups, k); 0 for padding.

        Returns:
            λ, (groups, k).
        """
        ...

    def update(self, importance: Tensor, gradient: Tensor) -> None:
        """Update λ in place.

        Args:
            importance: λ of all layers, concatenated.
            gradient: ∂L/∂λ, in the same order; may be overwritten.
        """
        ...

    def decay_lr(self, divisor: float) -> ImportanceRule:
        """Divide the step size.

        Args:
            divisor: The number to divide by.

        Returns:
            A copy with the smaller step size.
        """
        ...


@dataclass(frozen=True)
class Ones:
    """λ = 1: hard projection.

    Example:
        >>> import torch
        >>> from steppe.projection.importance import Ones
        >>> Ones().initial(torch.tensor([[3.0, 1.0]]))
        tensor([[1., 1.]])
    """

    dynamic: bool = False

    def initial(self, singular_values: Tensor) -> Tensor:
        """All ones."""
        return torch.ones_like(singular_values)

    def update(self, importance: Tensor, gradient: Tensor) -> None:
        """Does nothing."""

    def decay_lr(self, divisor: float) -> Ones:
        """Returns itself, as there is no step size."""
        return self


@dataclass(frozen=True)
class Sigmoid:
    """The paper's rule: λ ← σ(temperature · (λ − lr · ∂L/∂λ)), starting at λ = 1.

    Args:
        lr: The learning rate η2.
        temperature: The factor inside the sigmoid.
        clip: The maximum norm of the gradients of all layers together.
        sign: −1 ascends instead, as in the look-ahead member of the family.

    Example:
        >>> import torch
        >>> from steppe.projection.importance import Sigmoid
        >>> importance = torch.ones(2)
        >>> Sigmoid(lr=0.5).update(importance, torch.tensor([0.0, 2.0]))
        >>> importance  # σ(10 · 1) and σ(10 · (1 − 0.5 · 2))
        tensor([1.0000, 0.5000])
    """

    lr: float
    temperature: float = 10.0
    clip: float = 2.0
    sign: int = 1
    dynamic: bool = True

    def initial(self, singular_values: Tensor) -> Tensor:
        """All ones."""
        return torch.ones_like(singular_values)

    def update(self, importance: Tensor, gradient: Tensor) -> None:
        """Take one step of gradient descent on λ, then apply the sigmoid."""
        length = torch.linalg.vector_norm(gradient)
        factor = clip_ratio(float(length), self.clip) if length.is_cpu else clip_ratio_tensor(length, self.clip)
        step = gradient.mul_(self.sign * self.lr * factor)
        importance.sub_(step).mul_(self.temperature).sigmoid_()

    def decay_lr(self, divisor: float) -> Sigmoid:
        """A copy with the smaller step size."""
        return replace(self, lr=self.lr / divisor)


@dataclass(frozen=True)
class Spectral:
    """λ_i = (α + 1) σ_i / (α σ_i + σ_max): near 1 for strong directions, lower for weak ones; fixed during a task.

    Args:
        alpha: α; the larger, the closer λ stays to 1.

    Example:
        >>> import torch
        >>> from steppe.projection.importance import Spectral
        >>> Spectral(alpha=1.0).initial(torch.tensor([[3.0, 1.0, 0.0]]))
        tensor([[1.0000, 0.5000, 0.0000]])
    """

    alpha: float
    dynamic: bool = False

    def initial(self, singular_values: Tensor) -> Tensor:
        """λ from the singular values, per group; padding gets 0."""
        top = singular_values.amax(-1, keepdim=True).clamp(min=torch.finfo(singular_values.dtype).tiny)
        return (self.alpha + 1) * singular_values / (self.alpha * singular_values + top)

    def update(self, importance: Tensor, gradient: Tensor) -> None:
        """Does nothing."""

    def decay_lr(self, divisor: float) -> Spectral:
        """Returns itself, as there is no step size."""
        return self


@dataclass(frozen=True)
class Ridge:
    """λ_i = r_i (1 + a) / (r_i + a) with r_i = σ_i² / σ_max²; fixed during a task, for bases that hold every direction.

    It is the shrinkage of ridge regression, scaled so that the strongest direction has λ = 1. For a → 0, λ → 1 for
    every direction with energy: hard projection. For a → ∞, λ → r_i.

    Args:
        a: The share of the strongest direction's energy at which λ is about a half.

    Example:
        >>> import torch
        >>> from steppe.projection.importance import Ridge
        >>> Ridge(a=0.25).initial(torch.tensor([[2.0, 1.0, 0.0]]))
        tensor([[1.0000, 0.6250, 0.0000]])
    """

    a: float
    dynamic: bool = False

    def initial(self, singular_values: Tensor) -> Tensor:
        """λ from the singular values, per group; directions without energy get 0."""
        top = singular_values.amax(-1, keepdim=True).clamp(min=torch.finfo(singular_values.dtype).tiny)
        share = (singular_values / top).square()
        return (1 + self.a) * share / (share + self.a)

    def update(self, importance: Tensor, gradient: Tensor) -> None:
        """Does nothing."""

    def decay_lr(self, divisor: float) -> Ridge:
        """Returns itself, as there is no step size."""
        return self
