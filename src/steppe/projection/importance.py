"""Importance rules: what λ is when a task starts, and how an update moves it (docs/concepts.md: soft projection,
importances).

`ones` never moves; `sigmoid` is the paper's rule to the letter (and, measured, inert: σ(10·λ) returns to 0.99995
whatever a step of the paper's size did); `spectral` fixes λ per task from the singular values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from steppe.tensors.clipping import clip_ratio, clip_ratio_tensor


class ImportanceRule(Protocol):
    """One way to weigh the basis directions."""

    @property
    def dynamic(self) -> bool:
        """Whether updates move λ; if not, its gradient is never computed."""
        ...

    def initial(self, singular_values: Tensor) -> Tensor:
        """λ at the start of a task, (groups, k), from the kept singular values."""
        ...

    def move(self, importance: Tensor, gradient: Tensor) -> None:
        """Move λ, all layers' in a row, by one update with gradient ∂L/∂λ, in place; the gradient may be used up."""
        ...

    def decayed(self, divisor: float) -> ImportanceRule:
        """The same rule with smaller steps."""
        ...


@dataclass(frozen=True)
class Ones:
    """λ = 1: hard projection."""

    dynamic: bool = False

    def initial(self, singular_values: Tensor) -> Tensor:
        """All ones."""
        return torch.ones_like(singular_values)

    def move(self, importance: Tensor, gradient: Tensor) -> None:
        """Unmoved."""

    def decayed(self, divisor: float) -> Ones:
        """There are no steps."""
        return self


@dataclass(frozen=True)
class Sigmoid:
    """The paper's rule: λ ← σ(temperature · (λ − lr · ∂L/∂λ)), from λ = 1.

    The gradients of all layers are clipped together to the norm `clip`. `sign` is −1 for the look-ahead member,
    which climbs.
    """

    lr: float
    temperature: float = 10.0
    clip: float = 2.0
    sign: int = 1
    dynamic: bool = True

    def initial(self, singular_values: Tensor) -> Tensor:
        """All ones."""
        return torch.ones_like(singular_values)

    def move(self, importance: Tensor, gradient: Tensor) -> None:
        """One step of gradient descent on λ, then the sigmoid."""
        length = torch.linalg.vector_norm(gradient)
        factor = clip_ratio(float(length), self.clip) if length.is_cpu else clip_ratio_tensor(length, self.clip)
        step = gradient.mul_(self.sign * self.lr * factor)
        importance.sub_(step).mul_(self.temperature).sigmoid_()

    def decayed(self, divisor: float) -> Sigmoid:
        """The same with a smaller step size."""
        return replace(self, lr=self.lr / divisor)


@dataclass(frozen=True)
class Spectral:
    """λ_i = (α + 1) σ_i / (α σ_i + σ_max): near 1 for strong directions, less for weak ones; fixed within a task."""

    alpha: float
    dynamic: bool = False

    def initial(self, singular_values: Tensor) -> Tensor:
        """From the singular values, per group; padding stays 0."""
        top = singular_values.amax(-1, keepdim=True).clamp(min=torch.finfo(singular_values.dtype).tiny)
        return (self.alpha + 1) * singular_values / (self.alpha * singular_values + top)

    def move(self, importance: Tensor, gradient: Tensor) -> None:
        """Unmoved."""

    def decayed(self, divisor: float) -> Spectral:
        """There are no steps."""
        return self
