"""Sharpness evaluation (Algorithm 1, the inner loop): the perturbation v, and the loss and its gradients at w + v.

v starts at 0 and takes K steps v += η1 · within(∇L_D(w + v)), each projected gradient clamped elementwise. Two forms:
`whole`, the paper's, takes every step on all of D and the loss on D ∪ N once, at the end; `chunked`, the released
code's, cuts D into K chunks, takes one step on each, and averages the K losses on D ∪ N taken after each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steppe.network import Network
from steppe.projection.importance import Importances
from steppe.projection.memory import GradientMemory
from steppe.types import Batch, Direction, Gradient, Outer, multiplied


@dataclass(frozen=True)
class Perturbed:
    """What step 2 and step 3 of the update need: L_{D∪N}(w + v), its gradient in w, and its gradient in λ."""

    loss: Tensor
    gradient: Gradient
    importance_gradient: Importances
    coordinates: Gradient | None = None
    """The gradient along the bases, G M, where it had to be computed anyway."""


@dataclass(frozen=True)
class Ascent:
    """How v is found. A negative `lr` descends instead: the look-ahead member of the family."""

    lr: float
    steps: int = 2
    clamp: float = 2.0
    chunked: bool = False
    second_order: bool = False

    def __call__(
        self, network: Network, memory: GradientMemory, current: Batch, union: Batch, *, statistics: bool = True
    ) -> Perturbed:
        """Perturb by the current batch D within the memory; evaluate on the union D ∪ N.

        Of all the forwards only the last moves running statistics, and that only with `statistics`.
        """
        evaluate = _second_order if self.second_order else _first_order
        return evaluate(self, network, memory, current, union, statistics)

    def slowed(self, divisor: float) -> Ascent:
        """The same with smaller steps."""
        return replace(self, lr=self.lr / divisor)

    def schedule(self, current: Batch) -> Iterator[tuple[Batch, bool, bool]]:
        """The batch of each step, whether the loss on the union is taken after it, and whether it is the last."""
        if self.chunked:
            size = -(-len(current) // self.steps)
            parts = [current[start : start + size] for start in range(0, len(current), size)]
        else:
            parts = [current] * self.steps
        for place, part in enumerate(parts, start=1):
            last = place == len(parts)
            yield part, self.chunked or last, last


def _first_order(
    ascent: Ascent, network: Network, memory: GradientMemory, current: Batch, union: Batch, statistics: bool
) -> Perturbed:
    """Gradients that built v count as constants: ∂v/∂w = 0 and ∂v/∂λ_i = η1 · Σ_k G_k u_i u_iᵀ."""
    place: Direction | None = None  # w + v
    walked: dict[str, Tensor] = {}  # Σ_k G_k M
    losses: list[Tensor] = []
    gradients: list[Gradient] = []
    slopes: list[Importances] = []
    for part, evaluated, last in ascent.schedule(current):
        _, g = network.gradient(part, at=place, factored=memory.linear, statistics=False)
        along = memory.coordinates(g)
        step = {
            # What is projected is new; what passes through may share its memory with another gradient.
            name: (d if name in along else d.clone()).clamp_(-ascent.clamp, ascent.clamp)
            for name, d in memory.within(g, along).items()
        }
        place = network.moved(step, ascent.lr, onward=place is not None)
        walked = {name: walked.get(name, 0) + multiplied(c) for name, c in along.items()}
        if evaluated:
            loss, gradient = network.gradient(union, at=place, factored=memory.linear, statistics=statistics and last)
            losses.append(loss)
            gradients.append(gradient)
            seen = memory.coordinates(gradient) if memory.rule.dynamic else None
            if seen is not None:
                slopes.append({name: ascent.lr * _alignment(walked[name], c) for name, c in seen.items()})
    return Perturbed(
        torch.stack(losses).mean(),
        gradients[0] if len(gradients) == 1 else _mean(gradients),
        _mean(slopes) if slopes else {},
        seen if len(gradients) == 1 else None,
    )


def _second_order(
    ascent: Ascent, network: Network, memory: GradientMemory, current: Batch, union: Batch, statistics: bool
) -> Perturbed:
    """Differentiate through the ascent itself, in w and in λ."""
    weights = network.learnable
    leaves = {name: importance.clone().requires_grad_() for name, importance in memory.importances.items()}
    followed = GradientMemory(memory.rule)
    followed.projectors = {name: p.with_importance(leaves[name]) for name, p in memory.projectors.items()}
    moved: Direction = dict(weights)
    losses: list[Tensor] = []
    for part, evaluated, last in ascent.schedule(current):
        inner = network.functional_loss(part, moved, statistics=False)
        slopes = torch.autograd.grad(
            inner, list(moved.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
        projected = followed.within(dict(zip(moved, slopes, strict=True)))
        moved = {name: w + ascent.lr * projected[name].clamp(-ascent.clamp, ascent.clamp) for name, w in moved.items()}
        if evaluated:
            losses.append(network.functional_loss(union, moved, statistics=statistics and last))
    loss = torch.stack(losses).mean()
    wanted = [*weights.values(), *leaves.values()]
    found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return Perturbed(
        loss.detach(),
        network.completed(dict(zip(weights, found[: len(weights)], strict=True))),
        dict(zip(leaves, found[len(weights) :], strict=True)),
    )


def _alignment(ascent: Tensor, gradient: Tensor | Outer) -> Tensor:
    """Σ_rows (G_D u_i)(G_{D∪N} u_i) for every basis direction, (groups, k)."""
    return (ascent * multiplied(gradient)).sum(-2).reshape(-1, ascent.shape[-1])


def _mean(parts: Sequence[Gradient]) -> Direction:
    return {name: torch.stack([multiplied(part[name]) for part in parts]).mean(0) for name in parts[0]}
