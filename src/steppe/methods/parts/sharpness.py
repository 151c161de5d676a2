"""Sharpness evaluation (Algorithm 1, the inner loop): the perturbation v, and the loss and its gradients at w + v.

v starts at 0 and takes K steps v += η1 · within(∇L_D(w + v)), each projected gradient clamped elementwise. Two forms:
`whole`, the paper's, takes every step on all of D and the loss on D ∪ N once, at the end; `chunked`, the released
code's, cuts D into K chunks, takes one step on each, and averages the K losses on D ∪ N taken after each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from steppe.fast.factored import FactoredGrad, Gradient, ParamDict, columnwise_dot, mean_of, share_inputs, to_dense
from steppe.fast.linear_chain import WIDE, LinearChain
from steppe.fast.perturbed_chain import ChainGrad, PerturbedChain
from steppe.network.module_state import buffers_apart
from steppe.network.network import Network
from steppe.projection.memory import GradientMemory
from steppe.runtime.contexts import twice_differentiable
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class PerturbedGradient:
    """What step 2 and step 3 of the update need: L_{D∪N}(w + v), its gradient in w, and its gradient in λ, all
    weights' in a row, where λ moves.
    """

    loss: Tensor
    gradient: Gradient
    importance_gradient: Tensor | None
    coordinates: Gradient | None = None
    """The gradient along the bases, G M, of the weights for which it had to be computed anyway."""


@dataclass(frozen=True)
class SharpnessAscent:
    """How v is found. A negative `lr` descends instead: the look-ahead member of the family."""

    lr: float
    steps: int = 2
    clamp: float = 2.0
    chunked: bool = False
    second_order: bool = False
    every_forward: bool = False
    """Whether each forward moves running statistics (BatchNorm), as in the released code."""
    _chain: list[PerturbedChain] = field(default_factory=list, init=False, repr=False, compare=False)
    """What was made for the last chain perturbed: mostly it serves the next update as well."""

    def __call__(
        self, network: Network, memory: GradientMemory, current: Batch, union: Batch, *, statistics: bool = True
    ) -> PerturbedGradient:
        """Perturb by the current batch D within the memory; evaluate on the union D ∪ N.

        Of all the forwards only the last moves running statistics, and that only with `statistics`; with
        `every_forward` all of them do.
        """
        chain = None if self.second_order or network.weights.has_frozen else network.chain
        if chain is not None and current.x.data_ptr() == union.x.data_ptr():  # D is the first of D ∪ N
            return _on_chain(self, chain, network, memory, current, union)
        if not self.second_order:
            return _first_order(self, network, memory, current, union, statistics)
        with twice_differentiable(network.model):
            return _second_order(self, network, memory, current, union, statistics)

    def decay_lr(self, divisor: float) -> SharpnessAscent:
        """The same with smaller steps."""
        return replace(self, lr=self.lr / divisor)

    def prepare_chain(
        self, links: LinearChain, network: Network, memory: GradientMemory, samples: int
    ) -> PerturbedChain:
        """The chain to be moved, for as many samples."""
        if not (self._chain and self._chain[0].fits(links, memory.projectors, samples)):
            self._chain[:] = [
                PerturbedChain(links, network, memory.projectors, memory.importance, samples, self.lr, self.clamp)
            ]
        return self._chain[0]

    def schedule(self, count: int) -> Iterator[tuple[slice, bool, bool]]:
        """The samples of each step, whether the loss on the union is taken after it, and whether it is the last."""
        if self.chunked:
            size = -(-count // self.steps)
            parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        else:
            parts = [slice(0, count)] * self.steps
        for place, part in enumerate(parts, start=1):
            last = place == len(parts)
            yield part, self.chunked or last, last


def _first_order(
    ascent: SharpnessAscent, network: Network, memory: GradientMemory, current: Batch, union: Batch, statistics: bool
) -> PerturbedGradient:
    """Gradients that built v count as constants: ∂v/∂w = 0 and ∂v/∂λ_i = η1 · Σ_k G_k u_i u_iᵀ."""
    place: ParamDict | None = None  # w + v
    walked: list[Gradient] = []  # G_k M
    losses: list[Tensor] = []
    gradients: list[Gradient] = []
    slopes: list[Tensor] = []
    seen: Gradient | None = None
    for part, evaluated, last in ascent.schedule(len(current)):
        _, g = network.loss_and_grad(current[part], at=place, factored=memory.linear, statistics=ascent.every_forward)
        along = memory.coordinates(g)
        step = {name: _clamp(d, ascent.clamp, name in along) for name, d in memory.project_onto(g, along).items()}
        place = network.scratch.perturbed(step, ascent.lr, onward=place is not None)
        walked.append(along)
        if evaluated:
            moving = ascent.every_forward or (statistics and last)
            loss, gradient = network.loss_and_grad(union, at=place, factored=memory.linear, statistics=moving)
            losses.append(loss)
            gradients.append(gradient)
            if memory and memory.rule.dynamic:
                seen = memory.coordinates(gradient)
                parts = [columnwise_dot([w[name] for w in walked], c).reshape(-1) for name, c in seen.items()]
                slopes.append(torch.cat(parts).mul_(ascent.lr))
    if len(gradients) == 1:
        return PerturbedGradient(losses[0], gradients[0], slopes[0] if slopes else None, seen)
    return PerturbedGradient(
        torch.stack(losses).mean(), _mean(gradients), torch.stack(slopes).mean(0) if slopes else None
    )


def _on_chain(
    ascent: SharpnessAscent, links: LinearChain, network: Network, memory: GradientMemory, current: Batch, union: Batch
) -> PerturbedGradient:
    """The same for a chain of linear layers, with what its passes share."""
    found: list[ChainGrad] = []
    losses: list[Tensor] = []
    with torch.inference_mode():  # nothing of it is ever differentiated, and every call is a tenth cheaper
        chain = ascent.prepare_chain(links, network, memory, len(union))
        flat, seen = union.flat(), current.flat()
        chain.start(flat.x)
        taken = slice(0, len(current))
        for part, evaluated, _ in ascent.schedule(len(current)):
            if part != taken:
                taken, seen = part, flat[part]
            chain.forward_backward(seen, part, with_loss=False)
            chain.ascend(part)
            if evaluated:
                losses.append(chain.forward_backward(flat, None))
                found.append(chain.gradient(with_importance=memory.rule.dynamic))
        if len(found) == 1:
            gradient, along, slopes = found[0]
            return PerturbedGradient(losses[0], gradient, slopes, along)
        moving = [part[2] for part in found if part[2] is not None]
        slopes = torch.stack(moving).mean(0) if moving else None
        known = {name: [part[1][name] for part in found] for name in found[0][1]}
        along = {name: mean_of(parts) for name, parts in known.items() if share_inputs(parts)}
        return PerturbedGradient(torch.stack(losses).mean(), _mean([part[0] for part in found]), slopes, along)


def _second_order(
    ascent: SharpnessAscent, network: Network, memory: GradientMemory, current: Batch, union: Batch, statistics: bool
) -> PerturbedGradient:
    """Differentiate through the ascent itself, in w and, where it moves, in λ."""
    weights, followed, leaves = network.weights.learnable, memory, ParamDict()
    if memory.rule.dynamic:
        leaves = {name: p.importance.clone().requires_grad_() for name, p in memory.projectors.items()}
        followed = GradientMemory(memory.rule)
        followed.projectors = {name: p.with_importance(leaves[name]) for name, p in memory.projectors.items()}
    moved: ParamDict = dict(weights)
    losses: list[Tensor] = []
    for part, evaluated, last in ascent.schedule(len(current)):
        inner = _differentiable_loss(ascent, network, current[part], moved, statistics=False)
        slopes = torch.autograd.grad(
            inner, list(moved.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
        projected = followed.project_onto(dict(zip(moved, slopes, strict=True)))
        moved = {
            name: w + ascent.lr * to_dense(projected[name]).clamp(-ascent.clamp, ascent.clamp)
            for name, w in moved.items()
        }
        if evaluated:
            losses.append(_differentiable_loss(ascent, network, union, moved, statistics=statistics and last))
    loss = torch.stack(losses).mean()
    wanted = [*weights.values(), *leaves.values()]
    found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return PerturbedGradient(
        loss.detach(),
        network.weights.with_zero_frozen(dict(zip(weights, found[: len(weights)], strict=True))),
        torch.cat([slope.reshape(-1) for slope in found[len(weights) :]]) if leaves else None,
    )


def _differentiable_loss(
    ascent: SharpnessAscent, network: Network, batch: Batch, weights: ParamDict, *, statistics: bool
) -> Tensor:
    """The loss as a part of one graph with those of other forwards, which may move the same running statistics."""
    if not ascent.every_forward:
        return network.functional_loss(batch, weights, statistics=statistics)
    with buffers_apart(network.model):
        return network.functional_loss(batch, weights)


def _clamp(d: Tensor | FactoredGrad, bound: float, new: bool) -> Tensor | FactoredGrad:
    """A step with each element within ±bound. Factors of a large matrix are left alone if their product is sure to be:
    |Σ_n δ_ni X_nj| ≤ Σ_n max|δ_n| max|X_n|.
    """
    if isinstance(d, FactoredGrad):
        large = d.left.shape[1] * d.right.shape[1] > WIDE and d.left.device.type == "cpu"
        if large and float(d.left.abs().amax(1) @ d.right.abs().amax(1)) <= bound:
            return d
        return d.dense().clamp_(-bound, bound)
    # What is projected is new; what passes through may share its memory with another gradient.
    return d.clamp_(-bound, bound) if new else d.clamp(-bound, bound)


def _mean(parts: Sequence[Gradient]) -> Gradient:
    return {name: mean_of([part[name] for part in parts]) for name in parts[0]}
