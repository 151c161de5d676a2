"""The perturbation v of flattened sharpness, at the weights themselves.

With P = M diag(λ) Mᵀ of the memory, v starts at 0 and takes K ascent steps of one of two forms:

    lr:        v ← v + η1 · clamp(∇L(w + v) P)        (FS-DGPM, Algorithm 1)
    radius:    v ← v + ρ / K · ∇L(w + v) P / ‖∇L(w + v) P‖        (SAM; ‖·‖ over all weights together)

Weights without a basis climb along their whole gradient, and so do all weights without a memory, or while it is empty.
With G_k the gradients of the ascent, c_k the factors of its steps, G the gradient at w + v and u_i a direction, the
derivative by its importance is

    ∂L/∂λ_i = Σ_k c_k (G_k u_i) · (G u_i).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steppe.custom_loop.gradient_memory import GradientProjectionMemory
from steppe.fast.factored import columnwise_dot, to_dense
from steppe.network.module_state import buffers_of
from steppe.projection.memory import Projector


@dataclass(frozen=True)
class AscentForm:
    """How v is found: either `radius` or `lr` is None."""

    radius: float | None
    lr: float | None
    steps: int
    clamp: float | None


class Perturbation:
    """The weights of an optimizer, moved uphill from w to w + v until `undo`.

    Args:
        groups: The optimizer's parameter groups.
        memory: The memory within which to climb.
    """

    @torch.no_grad()
    def __init__(self, groups: Sequence[Mapping[str, Any]], memory: GradientProjectionMemory | None) -> None:
        self._weights: list[Tensor] = [p for group in groups for p in group["params"] if p.requires_grad]
        self._before = [weight.clone() for weight in self._weights]
        self._projectors: dict[int, tuple[str, Projector]] = {}  # by the place of the weight
        self._learns_importances = False
        if memory is not None and memory.projectors:
            names = {id(p): name for name, p in memory.model.named_parameters()}
            for place, weight in enumerate(self._weights):
                name = names.get(id(weight), "")
                if name in memory.projectors:
                    self._projectors[place] = name, memory.projectors[name]
            self._learns_importances = memory.rule.dynamic
        self._along: dict[str, Tensor] = {}  # Σ_k c_k G_k M
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def ascend(self, form: AscentForm, grad_scale: float | Tensor | None) -> None:
        """Take one ascent step with the gradients that the weights hold.

        Args:
            form: How.
            grad_scale: What the gradients were multiplied by; if any is not finite, nothing moves.
        """
        moving, parts, coordinates = [], [], {}
        for place, weight in enumerate(self._weights):
            g = _gradient(weight, grad_scale)
            if g is None:
                continue
            if place in self._projectors:
                name, projector = self._projectors[place]
                g = g.to(projector.importance.dtype)
                coordinates[name] = to_dense(projector.coordinates(g))
                g = to_dense(projector.project_onto(g, coordinates[name])).to(weight.dtype)
            moving.append(weight)
            parts.append(g)
        if not parts:
            return
        factor: float | Tensor
        if form.radius is not None:
            factor = form.radius / form.steps / (_norm(parts) + 1e-12)
        else:
            assert form.lr is not None
            factor = form.lr
            if form.clamp is not None:
                parts = [part.clamp(-form.clamp, form.clamp) for part in parts]
        if grad_scale is not None:
            finite = torch.isfinite(_norm(parts))
            parts = [_if(finite, part) for part in parts]
            coordinates = {name: _if(finite, c) for name, c in coordinates.items()}
            factor = torch.where(finite, factor, 0.0)
        if isinstance(factor, Tensor):
            torch._foreach_add_(moving, [part * factor.to(part) for part in parts])
        else:
            torch._foreach_add_(moving, parts, alpha=factor)
        if self._learns_importances:
            for name, c in coordinates.items():
                scaled = c * (factor.to(c) if isinstance(factor, Tensor) else factor)
                self._along[name] = self._along[name] + scaled if name in self._along else scaled

    @torch.no_grad()
    def importance_gradients(self, grad_scale: float | Tensor | None) -> dict[str, Tensor]:
        """∂L/∂λ of each weight, with the gradients that the weights hold at w + v.

        Args:
            grad_scale: What the gradients were multiplied by; if any is not finite, ∂L/∂λ counts as 0.

        Returns:
            Them by parameter name, (groups, k); empty if importances are not learned.
        """
        gradients = {}
        for place, (name, projector) in self._projectors.items():
            g = _gradient(self._weights[place], grad_scale)
            if name in self._along and g is not None:
                along = projector.coordinates(g.to(projector.importance.dtype))
                gradients[name] = columnwise_dot([self._along[name]], along)
        if grad_scale is None or not gradients:
            return gradients
        finite = torch.isfinite(_norm(list(gradients.values())))
        return {name: _if(finite, g) for name, g in gradients.items()}

    @torch.no_grad()
    def hold_buffers(self, model: nn.Module) -> None:
        """Keep the model's buffers (running statistics) at the values that they had at the first call.

        Args:
            model: The model.
        """
        if not self._buffers:
            self._buffers = [(buffer, buffer.clone()) for _, _, buffer in buffers_of(model)]
        self._reset_buffers()

    @torch.no_grad()
    def undo(self) -> None:
        """Put the weights back at w, and the buffers held."""
        if self._weights:
            torch._foreach_copy_(self._weights, self._before)
        self._reset_buffers()

    def _reset_buffers(self) -> None:
        for buffer, value in self._buffers:
            buffer.copy_(value)


def _gradient(weight: Tensor, scale: float | Tensor | None) -> Tensor | None:
    """The gradient that a weight holds, dense, before it was multiplied by the scale."""
    if weight.grad is None:
        return None
    g = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
    return g if scale is None else g / scale


def _if(finite: Tensor, part: Tensor) -> Tensor:
    """The tensor, or zeros if something was not finite; without waiting for the device."""
    return torch.where(finite.to(part.device), part, 0.0)


def _norm(parts: list[Tensor]) -> Tensor:
    """The norm of all tensors together."""
    norms = torch._foreach_norm(parts)
    whole: Tensor = torch.stack([norm.to(norms[0]) for norm in norms]).norm()
    return whole
