"""La-MAML (Gupta, Yadav and Paull, NeurIPS 2020): look a few steps ahead, and learn how fast each weight may move.

One update, with a learning rate α for every single weight and Q the batch together with a draw of replay:

    θ_0 = θ;   θ_k = θ_{k−1} − a(α) ⊙ g_k,   g_k = ∇L(B_k; θ_{k−1}),   B_k the k-th slice of the shuffled batch
    meta-loss  L(θ, α) = (1/K) Σ_k L(Q; θ_k)
    α −= η ∇_α L;   then   θ −= relu(α) ⊙ ∇_θ L   (asynchronous)   or   θ −= lr ∇_θ L   (synchronous)

Second order differentiates through the inner steps. First order takes every g_k as a constant, which leaves
∇_θ = (1/K) Σ_k G_k and ∇_α = −a'(α) ⊙ (1/K) Σ_k G_k ⊙ Σ_{j≤k} g_j, with G_k = ∇L(Q; θ_k).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steppe.fast.factored import Gradient, ParamDict, to_dense
from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.sgd import clip_by_norm
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.contexts import twice_differentiable
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch, index_of


@dataclass(frozen=True)
class LaMAML(MethodConfig):
    """Settings of La-MAML."""

    rate: float = setting(0.15, "learning rate that every weight starts with (α0)", above=0)
    rate_lr: float = setting(0.3, "step size of the learning rates (η)", at_least=0)
    inner_steps: int = setting(5, "slices of the batch, one inner step on each (K)", at_least=1)
    second_order: bool = setting(False, "differentiate through the inner steps")
    asynchronous: bool = setting(True, "take the outer step with the learnt rates rather than with lr")
    lr: float = setting(0.1, "step size of the outer step, where it is synchronous", above=0)
    inner_relu: bool = setting(True, "negative learning rates count as 0 in the inner steps as well")
    inner_clamp: float = setting(0.0, "bound on each element of an inner gradient; 0: none", at_least=0)
    clip: float = setting(2.0, "norm to which the meta-gradients in α and in θ are clipped; 0: never", at_least=0)
    buffer: int = setting(200, "samples the replay buffer holds", at_least=1)
    replay_batch: int = setting(10, "samples drawn from it for an update, with replacement", at_least=1)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """La-MAML at work."""
        return _LaMAML(self, network, streams)


class MetaGradient(NamedTuple):
    """The meta-loss and its gradients in the weights and in the learning rates."""

    loss: Tensor
    weights: ParamDict
    rates: ParamDict


class _LaMAML(Method):
    state_attrs = ("replay", "rates")
    uses_bare_batch = True  # in the inner steps

    def __init__(self, settings: LaMAML, network: Network, streams: Streams) -> None:
        self.settings, self.network = settings, network
        self.replay = Reservoir(
            settings.buffer, streams.python_rng("replay draws"), streams.python_rng("replay pushes")
        )
        self.rates = {name: torch.full_like(p, settings.rate) for name, p in network.trainable.items()}
        self._pace = 1.0  # what cuts of the step sizes have left of them
        self._order, self._repeats = streams.python_rng("inner order"), streams.python_rng("replay repeats")

    def begin_task(self) -> None:
        self._pace = 1.0

    def decay_lr(self, divisor: float) -> float:
        """The learnt rates go on from task to task, so a cut shortens the steps, not the rates."""
        self._pace /= divisor
        return self._pace * (self.settings.rate if self.settings.asynchronous else self.settings.lr)

    def observe(self, batch: Batch) -> Tensor:
        union = self.network.prepare(batch.joined(self._sample_replay()))  # Q
        shuffled = index_of(self._order.sample(range(len(batch)), len(batch)), self.network.device)
        found = self.meta_gradient(union[shuffled], union)
        self._step(found)
        return found.loss

    def _sample_replay(self) -> Batch | None:
        """A draw of the buffer with replacement, no larger than the buffer is full."""
        held = len(self.replay)
        picks = [self._repeats.randrange(held) for _ in range(min(self.settings.replay_batch, held))]
        places = {pick: place for place, pick in enumerate(dict.fromkeys(picks))}
        drawn = self.replay.sample(len(places))  # distinct samples; which of them come again, the picks say
        return None if drawn is None else drawn[index_of((places[pick] for pick in picks), drawn.y.device)]

    def meta_gradient(self, current: Batch, union: Batch) -> MetaGradient:
        """The meta-loss of a prepared batch, on it and the replay draw, with its gradients.

        Of all the forwards only the last moves running statistics.
        """
        if not self.settings.second_order:
            return self._first_order(current, union)
        with twice_differentiable(self.network.model):
            return self._second_order(current, union)

    def _slices(self, current: Batch) -> Iterator[tuple[Batch, bool]]:
        """The slice of each inner step, and whether it is the last; a small batch has fewer of them."""
        size = -(-len(current) // self.settings.inner_steps)
        for start in range(0, len(current), size):
            yield current[start : start + size], start + size >= len(current)

    def _inner_rates(self, rates: ParamDict) -> ParamDict:
        """a(α), as short as the cuts have made it."""
        relu = self.settings.inner_relu
        return {name: (rate.relu() if relu else rate) * self._pace for name, rate in rates.items()}

    def _clamp(self, g: Tensor) -> Tensor:
        bound = self.settings.inner_clamp
        return g.clamp(-bound, bound) if bound else g

    def _first_order(self, current: Batch, union: Batch) -> MetaGradient:
        rates = self._inner_rates(self.rates)
        # The weights themselves stay where they are: nothing that breaks an update off can leave them elsewhere.
        moved = {name: weight.detach().clone() for name, weight in self.network.trainable.items()}
        walked: ParamDict = {}  # Σ_{j≤k} g_j
        slopes: ParamDict = {}  # Σ_k G_k
        products: ParamDict = {}  # Σ_k G_k ⊙ Σ_{j≤k} g_j
        losses: list[Tensor] = []
        for part, last in self._slices(current):
            _, inner = self.network.loss_and_grad(part, at=moved, statistics=False)
            with torch.no_grad():
                for name, g in _dense(inner).items():
                    g = self._clamp(g)
                    moved[name].addcmul_(rates[name], g, value=-1)
                    walked[name] = walked[name] + g if name in walked else g
            loss, outer = self.network.loss_and_grad(union, at=moved, statistics=last)
            losses.append(loss)
            for name, g in _dense(outer).items():
                slopes[name] = slopes[name] + g if name in slopes else g
                product = products[name] if name in products else torch.zeros_like(g)
                products[name] = product.addcmul_(g, walked[name])
        share = 1 / len(losses)
        return MetaGradient(
            torch.stack(losses).mean(),
            {name: total * share for name, total in slopes.items()},
            {name: self._rate_slope(name, total * -share) for name, total in products.items()},
        )

    def _rate_slope(self, name: str, slope: Tensor) -> Tensor:
        """The gradient in α from that in a(α)."""
        slope = slope * self._pace
        return slope * (self.rates[name] > 0) if self.settings.inner_relu else slope

    def _second_order(self, current: Batch, union: Batch) -> MetaGradient:
        weights = self.network.weights.learnable
        leaves = {name: self.rates[name].detach().requires_grad_() for name in weights}
        rates = self._inner_rates(leaves)
        moved: ParamDict = dict(weights)
        losses: list[Tensor] = []
        for part, last in self._slices(current):
            inner = self.network.functional_loss(part, moved, statistics=False)
            found = torch.autograd.grad(
                inner, list(moved.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
            moved = {name: w - rates[name] * self._clamp(g) for (name, w), g in zip(moved.items(), found, strict=True)}
            losses.append(self.network.functional_loss(union, moved, statistics=last))
        loss = torch.stack(losses).mean()
        found = torch.autograd.grad(
            loss, [*weights.values(), *leaves.values()], allow_unused=True, materialize_grads=True
        )
        return MetaGradient(
            loss.detach(),
            dict(zip(weights, found[: len(weights)], strict=True)),
            dict(zip(leaves, found[len(weights) :], strict=True)),
        )

    @torch.no_grad()
    def _step(self, found: MetaGradient) -> None:
        """First the learning rates, then the weights, either at one blow: no interrupt comes between two of them."""
        rates, weights = _dense(clip_by_norm(found.rates, self.settings.clip)), found.weights
        moving = [self.rates[name] for name in rates]
        torch._foreach_add_(moving, list(rates.values()), alpha=-(self._pace * self.settings.rate_lr))
        steps = _dense(clip_by_norm(weights, self.settings.clip))
        moving = [self.network.trainable[name] for name in steps]
        if self.settings.asynchronous:
            taken = [self.rates[name].relu() for name in steps]
            torch._foreach_addcmul_(moving, taken, list(steps.values()), value=-self._pace)
        else:
            torch._foreach_add_(moving, list(steps.values()), alpha=-(self._pace * self.settings.lr))

    def after_batch(self, batch: Batch) -> None:
        self.replay.add(batch)

    def memory_bytes(self) -> dict[str, int]:
        rates = sum(rate.nbytes for rate in self.rates.values())
        return {"replay": self.replay.memory_bytes(), "bases": 0, "rates": rates}

    def diagnostics(self) -> dict[str, Any]:
        return {
            "rates": {
                name: {"mean": float(rate.mean()), "negative": float((rate < 0).double().mean())}
                for name, rate in self.rates.items()
            }
        }


def _dense(gradient: Gradient) -> ParamDict:
    return {name: to_dense(g) for name, g in gradient.items()}


_CIFAR = {
    "rate": 0.1,
    "rate_lr": 0.5,
    "second_order": True,
    "inner_relu": False,
    "inner_clamp": 1.0,
    "clip": 1.0,
    "buffer": 1000,
}
register_method(
    "la-maml",
    LaMAML,
    "Look-ahead meta-learning of a learning rate for every weight, with replay.",
    presets={
        "pmnist": {"rate": 0.15, "rate_lr": 0.3, "buffer": 200},
        "pmnist-60k": {"rate": 0.15, "rate_lr": 0.3, "buffer": 1000},
        "cifar100-split": _CIFAR,
        "cifar100-superclass": _CIFAR,
        "tiny-imagenet": {**_CIFAR, "rate_lr": 0.4, "buffer": 400},
    },
)
