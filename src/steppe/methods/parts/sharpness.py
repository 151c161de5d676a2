"""Sharpness evaluation (Algorithm 1, the inner loop): the perturbation v, and the loss and its gradients at w + v.

v starts at 0 and takes K steps v ← v + η1 · ∇L_D(w + v) M Λ Mᵀ, each projected gradient clamped elementwise. There are
two forms. `whole` (the paper) takes each step on all of D and evaluates the loss on D ∪ N once, at the end. `chunked`
(the released code) splits D into K chunks, takes one step on each, and averages the losses on D ∪ N after each step.
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
    """What steps 2 and 3 of Algorithm 1 need: L_{D∪N}(w + v), its gradient in w and, if λ is dynamic, its gradient in λ
    (those of all weights concatenated).
    """

    loss: Tensor
    gradient: Gradient
    importance_gradient: Tensor | None
    coordinates: Gradient | None = None
    """The gradient along the bases, G M, of the weights for which it was computed anyway."""


@dataclass(frozen=True)
class SharpnessAscent:
    """The sharpness ascent of Algorithm 1: finds v, and evaluates the loss and its gradients at w + v.

    Args:
        lr: The step size η1. A negative one descends, as in the look-ahead member of the family.
        steps: The number of steps K.
        clamp: The bound on each element of a projected gradient.
        chunked: Whether each step sees only a chunk of the batch, as in the released code.
        second_order: Whether to differentiate through the steps.
        every_forward: Whether every forward updates running statistics, as in the released code, or only the last.

    Example:
        >>> import torch
        >>> from steppe import Batch
        >>> from steppe.methods.parts.sharpness import SharpnessAscent
        >>> from steppe.network.network import Network
        >>> from steppe.projection.importance import Ones
        >>> from steppe.projection.memory import GradientMemory
        >>> network = Network(torch.nn.Linear(4, 2))
        >>> network.heads.add(None, outputs=2)
        >>> y = torch.arange(10) % 2
        >>> batch = network.prepare(Batch(torch.randn(10, 4), y, torch.zeros_like(y)))
        >>> loss, _ = network.loss_and_grad(batch)
        >>> ascent = SharpnessAscent(lr=0.1, steps=2)
        >>> perturbed = ascent(network, GradientMemory(Ones()), current=batch, union=batch)
        >>> bool(perturbed.loss > loss)
        True
    """

    lr: float
    steps: int = 2
    clamp: float = 2.0
    chunked: bool = False
    second_order: bool = False
    every_forward: bool = False
    """Whether every forward updates running statistics (BatchNorm), as in the released code."""
    _chain: list[PerturbedChain] = field(default_factory=list, init=False, repr=False, compare=False)
    """The buffers of the last update on a linear chain, which the next one usually reuses."""

    def __call__(
        self, network: Network, memory: GradientMemory, current: Batch, union: Batch, *, statistics: bool = True
    ) -> PerturbedGradient:
        """Find v on D within the memory, and evaluate D ∪ N at w + v.

        Args:
            network: The network, which stays at w.
            memory: The gradient memory; an empty one does not restrict v.
            current: D, prepared; the first samples of `union`.
            union: D ∪ N, prepared.
            statistics: Whether the last forward updates running statistics; with `every_forward` all do in any case.

        Returns:
            The loss and its gradients at w + v.
        """
        chain = None if self.second_order or network.weights.has_frozen else network.chain
        if chain is not None and current.x.data_ptr() == union.x.data_ptr():  # D is the first of D ∪ N
            return _on_chain(self, chain, network, memory, current, union)
        if not self.second_order:
            return _first_order(self, network, memory, current, union, statistics)
        with twice_differentiable(network.model):
            return _second_order(self, network, memory, current, union, statistics)

    def decay_lr(self, divisor: float) -> SharpnessAscent:
        """Divide the step size.

        Args:
            divisor: The number to divide by.

        Returns:
            A copy with the smaller step size.
        """
        return replace(self, lr=self.lr / divisor)

    def prepare_chain(
        self, links: LinearChain, network: Network, memory: GradientMemory, samples: int
    ) -> PerturbedChain:
        """The chain of linear layers at w + v: the last update's if it still fits, or a new one.

        Args:
            links: The network's linear chain.
            network: The network.
            memory: The gradient memory.
            samples: The number of samples in D ∪ N.

        Returns:
            The chain, to be started at v = 0.
        """
        if not (self._chain and self._chain[0].fits(links, memory.projectors, samples)):
            self._chain[:] = [
                PerturbedChain(links, network, memory.projectors, memory.importance, samples, self.lr, self.clamp)
            ]
        return self._chain[0]

    def schedule(self, count: int) -> Iterator[tuple[slice, bool, bool]]:
        """The ascent steps.

        Args:
            count: The number of samples in D.

        Yields:
            The samples of each step, whether the loss on D ∪ N is evaluated after it, and whether it is the last.
        """
        if self.chunked:
            size = -(-count // self.steps)
            parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        else:
            parts = [slice(0, count)] * self.steps
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            yield part, self.chunked or last, last


def _first_order(
    ascent: SharpnessAscent, network: Network, memory: GradientMemory, current: Batch, union: Batch, statistics: bool
) -> PerturbedGradient:
    """Treat the gradients that built v as constants: ∂v/∂w = 0 and ∂v/∂λ_i = η1 · Σ_k G_k u_i u_iᵀ."""
    weights: ParamDict | None = None  # w + v
    ascent_coordinates: list[Gradient] = []  # G_k M
    losses: list[Tensor] = []
    gradients: list[Gradient] = []
    importance_gradients: list[Tensor] = []
    coordinates: Gradient | None = None
    for part, evaluated, last in ascent.schedule(len(current)):
        _, g = network.loss_and_grad(current[part], at=weights, factored=memory.linear, statistics=ascent.every_forward)
        along = memory.coordinates(g)
        step = {name: _clamp(d, ascent.clamp, name in along) for name, d in memory.project_onto(g, along).items()}
        weights = network.scratch.perturbed(step, ascent.lr, onward=weights is not None)
        ascent_coordinates.append(along)
        if evaluated:
            moving = ascent.every_forward or (statistics and last)
            loss, gradient = network.loss_and_grad(union, at=weights, factored=memory.linear, statistics=moving)
            losses.append(loss)
            gradients.append(gradient)
            if memory and memory.rule.dynamic:
                coordinates = memory.coordinates(gradient)
                parts = [
                    columnwise_dot([along[name] for along in ascent_coordinates], c).reshape(-1)
                    for name, c in coordinates.items()
                ]
                importance_gradients.append(torch.cat(parts).mul_(ascent.lr))
    if len(gradients) == 1:
        single = importance_gradients[0] if importance_gradients else None
        return PerturbedGradient(losses[0], gradients[0], single, coordinates)
    return PerturbedGradient(
        torch.stack(losses).mean(),
        _mean(gradients),
        torch.stack(importance_gradients).mean(0) if importance_gradients else None,
    )


def _on_chain(
    ascent: SharpnessAscent, links: LinearChain, network: Network, memory: GradientMemory, current: Batch, union: Batch
) -> PerturbedGradient:
    """`_first_order` for a chain of linear layers, sharing work between its passes."""
    parts: list[ChainGrad] = []
    losses: list[Tensor] = []
    with torch.inference_mode():  # nothing is differentiated, and every call is a tenth cheaper
        chain = ascent.prepare_chain(links, network, memory, len(union))
        flat, ascended = union.flat(), current.flat()
        seen = ascended
        chain.start(flat.x)
        taken = slice(0, len(current))
        for part, evaluated, _ in ascent.schedule(len(current)):
            if part != taken:
                taken, seen = part, ascended[part]  # not of the union, whose samples have shares in its loss
            chain.forward_backward(seen, part, with_loss=False)
            chain.ascend(part)
            if evaluated:
                losses.append(chain.forward_backward(flat, None))
                parts.append(chain.gradient(with_importance=memory.rule.dynamic))
        if len(parts) == 1:
            gradient, along, importance_gradient = parts[0]
            return PerturbedGradient(losses[0], gradient, importance_gradient, along)
        importance_gradients = [part[2] for part in parts if part[2] is not None]
        importance_gradient = torch.stack(importance_gradients).mean(0) if importance_gradients else None
        known = {name: [part[1][name] for part in parts] for name in parts[0][1]}
        along = {name: mean_of(known_parts) for name, known_parts in known.items() if share_inputs(known_parts)}
        return PerturbedGradient(
            torch.stack(losses).mean(), _mean([part[0] for part in parts]), importance_gradient, along
        )


def _second_order(
    ascent: SharpnessAscent, network: Network, memory: GradientMemory, current: Batch, union: Batch, statistics: bool
) -> PerturbedGradient:
    """Differentiate through the ascent itself, in w and, if it is dynamic, in λ."""
    weights, differentiable, leaves = network.weights.learnable, memory, ParamDict()
    if memory.rule.dynamic:
        leaves = {name: p.importance.clone().requires_grad_() for name, p in memory.projectors.items()}
        differentiable = GradientMemory(memory.rule)
        differentiable.projectors = {name: p.with_importance(leaves[name]) for name, p in memory.projectors.items()}
    perturbed: ParamDict = dict(weights)
    losses: list[Tensor] = []
    for part, evaluated, last in ascent.schedule(len(current)):
        inner = _differentiable_loss(ascent, network, current[part], perturbed, statistics=False)
        gradients = torch.autograd.grad(
            inner, list(perturbed.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
        projected = differentiable.project_onto(dict(zip(perturbed, gradients, strict=True)))
        perturbed = {
            name: w + ascent.lr * to_dense(projected[name]).clamp(-ascent.clamp, ascent.clamp)
            for name, w in perturbed.items()
        }
        if evaluated:
            losses.append(_differentiable_loss(ascent, network, union, perturbed, statistics=statistics and last))
    loss = torch.stack(losses).mean()
    inputs = [*weights.values(), *leaves.values()]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return PerturbedGradient(
        loss.detach(),
        network.weights.with_zero_frozen(dict(zip(weights, gradients[: len(weights)], strict=True))),
        torch.cat([g.reshape(-1) for g in gradients[len(weights) :]]) if leaves else None,
    )


def _differentiable_loss(
    ascent: SharpnessAscent, network: Network, batch: Batch, weights: ParamDict, *, statistics: bool
) -> Tensor:
    """The loss within one graph with other forwards, which may update the same running statistics."""
    if not ascent.every_forward:
        return network.functional_loss(batch, weights, statistics=statistics)
    with buffers_apart(network.model):
        return network.functional_loss(batch, weights)


def _clamp(d: Tensor | FactoredGrad, bound: float, new: bool) -> Tensor | FactoredGrad:
    """Clamp each element of a step to ±bound."""
    if isinstance(d, FactoredGrad):
        # |Σ_n δ_ni X_nj| ≤ Σ_n max|δ_n| max|X_n|: if that is within the bound, a large matrix can stay factored.
        large = d.left.shape[1] * d.right.shape[1] > WIDE and d.left.device.type == "cpu"
        if large and float(d.left.abs().amax(1) @ d.right.abs().amax(1)) <= bound:
            return d
        return d.dense().clamp_(-bound, bound)
    # A projected step is a new tensor; one that passed through may share memory with another gradient.
    return d.clamp_(-bound, bound) if new else d.clamp(-bound, bound)


def _mean(parts: Sequence[Gradient]) -> Gradient:
    return {name: mean_of([part[name] for part in parts]) for name in parts[0]}
