"""La-MAML (Gupta, Yadav and Paull, NeurIPS 2020): look a few steps ahead, and meta-learn a learning rate per weight.

One update, with a learning rate α for every weight and Q the batch together with replay samples:

    θ_0 = θ;   θ_k = θ_{k−1} − a(α) ⊙ g_k,   g_k = ∇L(B_k; θ_{k−1}),   B_k the k-th slice of the shuffled batch
    meta-loss  L(θ, α) = (1/K) Σ_k L(Q; θ_k)
    α −= η ∇_α L;   then   θ −= relu(α) ⊙ ∇_θ L   (asynchronous)   or   θ −= lr ∇_θ L   (synchronous)

Second order differentiates through the inner steps. First order treats every g_k as a constant, which gives
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
from steppe.network.growing_head import GrowingHead
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

    takes_any_optimizer = False  # it learns a learning rate for every weight

    rate: float = setting(0.15, "initial learning rate of every weight (α0)", above=0)
    rate_lr: float = setting(0.3, "learning rate of the learning rates (η)", at_least=0)
    inner_steps: int = setting(5, "inner steps, each on one slice of the batch (K)", at_least=1)
    second_order: bool = setting(False, "differentiate through the inner steps")
    asynchronous: bool = setting(True, "take the outer step with the learned rates instead of with lr")
    lr: float = setting(0.1, "learning rate of the outer step if it is not asynchronous", above=0)
    inner_relu: bool = setting(True, "treat negative learning rates as 0 in the inner steps too")
    inner_clamp: float = setting(
        0.0, "each element of an inner gradient is clamped to ± this; 0 disables clamping", at_least=0
    )
    clip: float = setting(
        2.0, "maximum norm of the meta-gradient in α, and of that in θ; 0 disables clipping", at_least=0
    )
    buffer: int = setting(200, "replay buffer size in samples", at_least=1)
    replay_batch: int = setting(10, "samples drawn from the buffer per update, with replacement", at_least=1)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        return _LaMAML(self, network, streams)


class MetaGradient(NamedTuple):
    """The meta-loss, and its gradients in the weights and in the learning rates."""

    loss: Tensor
    weights: ParamDict
    rates: ParamDict


class _LaMAML(Method):
    state_attrs = ("replay", "rates")
    uses_bare_batch = True  # by the inner steps

    def __init__(self, settings: LaMAML, network: Network, streams: Streams) -> None:
        self.settings, self.network = settings, network
        self.replay = Reservoir.from_streams(settings.buffer, streams)
        self.rates = {name: torch.full_like(p, settings.rate) for name, p in network.trainable.items()}
        self._pace = 1.0  # the factor by which `decay_lr` has shortened all steps
        self._order, self._repeats = streams.python_rng("inner order"), streams.python_rng("replay repeats")

    def begin_task(self) -> None:
        self._pace = 1.0

    def decay_lr(self, divisor: float) -> float:
        """Shorten the steps, not the learned rates, which carry over to the next task."""
        self._pace /= divisor
        return self._pace * (self.settings.rate if self.settings.asynchronous else self.settings.lr)

    def grow_head(self, head: GrowingHead) -> None:
        self.rates = {name: head.fit(name, rate, fill=self.settings.rate) for name, rate in self.rates.items()}

    def observe(self, batch: Batch) -> Tensor:
        union = self.network.prepare(batch.joined(self._sample_replay()))  # Q
        shuffled = index_of(self._order.sample(range(len(batch)), len(batch)), self.network.device)
        meta = self.meta_gradient(union[shuffled], union)
        self._step(meta)
        return meta.loss

    def _sample_replay(self) -> Batch | None:
        """Draw from the buffer with replacement, at most as many samples as it holds."""
        available = len(self.replay)
        picks = [self._repeats.randrange(available) for _ in range(min(self.settings.replay_batch, available))]
        rows = {pick: row for row, pick in enumerate(dict.fromkeys(picks))}
        distinct = self.replay.sample(len(rows))  # distinct samples, which `picks` repeats
        return None if distinct is None else distinct[index_of((rows[pick] for pick in picks), distinct.y.device)]

    def meta_gradient(self, current: Batch, union: Batch) -> MetaGradient:
        """Evaluate the meta-loss and its gradients. Only the last forward updates running statistics.

        Args:
            current: The prepared batch, shuffled.
            union: Q, the prepared batch with the replay samples.

        Returns:
            The meta-loss with its gradients.
        """
        if not self.settings.second_order:
            return self._first_order(current, union)
        with twice_differentiable(self.network.model):
            return self._second_order(current, union)

    def _slices(self, current: Batch) -> Iterator[tuple[Batch, bool]]:
        """The slice B_k of each inner step, and whether it is the last; a small batch has fewer than K slices."""
        size = -(-len(current) // self.settings.inner_steps)
        for start in range(0, len(current), size):
            yield current[start : start + size], start + size >= len(current)

    def _inner_rates(self, rates: ParamDict) -> ParamDict:
        """a(α), shortened by the decays of the learning rate."""
        relu = self.settings.inner_relu
        return {name: (rate.relu() if relu else rate) * self._pace for name, rate in rates.items()}

    def _clamp(self, g: Tensor) -> Tensor:
        bound = self.settings.inner_clamp
        return g.clamp(-bound, bound) if bound else g

    def _first_order(self, current: Batch, union: Batch) -> MetaGradient:
        rates = self._inner_rates(self.rates)
        # A copy: an interrupted update must leave the weights themselves unchanged.
        moved = {name: weight.detach().clone() for name, weight in self.network.trainable.items()}
        inner_sum: ParamDict = {}  # Σ_{j≤k} g_j
        outer_sum: ParamDict = {}  # Σ_k G_k
        products: ParamDict = {}  # Σ_k G_k ⊙ Σ_{j≤k} g_j
        losses: list[Tensor] = []
        for part, last in self._slices(current):
            _, inner = self.network.loss_and_grad(part, at=moved, statistics=False)
            with torch.no_grad():
                for name, g in _dense(inner).items():
                    g = self._clamp(g)
                    moved[name].addcmul_(rates[name], g, value=-1)
                    inner_sum[name] = inner_sum[name] + g if name in inner_sum else g
            loss, outer = self.network.loss_and_grad(union, at=moved, statistics=last)
            losses.append(loss)
            for name, g in _dense(outer).items():
                outer_sum[name] = outer_sum[name] + g if name in outer_sum else g
                product = products[name] if name in products else torch.zeros_like(g)
                products[name] = product.addcmul_(g, inner_sum[name])
        share = 1 / len(losses)
        return MetaGradient(
            torch.stack(losses).mean(),
            {name: total * share for name, total in outer_sum.items()},
            {name: self._rate_gradient(name, total * -share) for name, total in products.items()},
        )

    def _rate_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient in α, from the gradient in a(α)."""
        gradient = gradient * self._pace
        return gradient * (self.rates[name] > 0) if self.settings.inner_relu else gradient

    def _second_order(self, current: Batch, union: Batch) -> MetaGradient:
        weights = self.network.weights.learnable
        leaves = {name: self.rates[name].detach().requires_grad_() for name in weights}
        rates = self._inner_rates(leaves)
        moved: ParamDict = dict(weights)
        losses: list[Tensor] = []
        for part, last in self._slices(current):
            inner = self.network.functional_loss(part, moved, statistics=False)
            gradients = torch.autograd.grad(
                inner, list(moved.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
            moved = {
                name: w - rates[name] * self._clamp(g) for (name, w), g in zip(moved.items(), gradients, strict=True)
            }
            losses.append(self.network.functional_loss(union, moved, statistics=last))
        loss = torch.stack(losses).mean()
        gradients = torch.autograd.grad(
            loss, [*weights.values(), *leaves.values()], allow_unused=True, materialize_grads=True
        )
        return MetaGradient(
            loss.detach(),
            dict(zip(weights, gradients[: len(weights)], strict=True)),
            dict(zip(leaves, gradients[len(weights) :], strict=True)),
        )

    @torch.no_grad()
    def _step(self, meta: MetaGradient) -> None:
        """Update the learning rates, then the weights, each in a single call that no interrupt can split."""
        rate_steps = _dense(clip_by_norm(meta.rates, self.settings.clip))
        rates = [self.rates[name] for name in rate_steps]
        torch._foreach_add_(rates, list(rate_steps.values()), alpha=-(self._pace * self.settings.rate_lr))
        steps = _dense(clip_by_norm(meta.weights, self.settings.clip))
        weights: list[Tensor] = [self.network.trainable[name] for name in steps]
        if self.settings.asynchronous:
            learned = [self.rates[name].relu() for name in steps]
            torch._foreach_addcmul_(weights, learned, list(steps.values()), value=-self._pace)
        else:
            torch._foreach_add_(weights, list(steps.values()), alpha=-(self._pace * self.settings.lr))

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
    "Look-ahead meta-learning of a learning rate per weight, with replay.",
    presets={
        "pmnist": {"rate": 0.15, "rate_lr": 0.3, "buffer": 200},
        "pmnist-60k": {"rate": 0.15, "rate_lr": 0.3, "buffer": 1000},
        "cifar100-split": _CIFAR,
        "cifar100-superclass": _CIFAR,
        "tiny-imagenet": {**_CIFAR, "rate_lr": 0.4, "buffer": 400},
    },
)
