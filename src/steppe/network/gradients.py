"""Gradients by autograd, dense or as the factors of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from steppe.fast.factored import FactoredGrad, Gradient, ParamDict
from steppe.fast.linear_hooks import LinearCall, outer_product, record_linear_calls
from steppe.network.module_state import buffers_of, preserve_buffers, swap_parameters
from steppe.network.weights import Weights


class Gradients:
    """Derivatives of a loss in the trainable weights; frozen weights get zeros."""

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._model, self._weights = model, weights
        self._has_buffers = bool(buffers_of(model))

    def of(self, loss: Tensor) -> ParamDict:
        """Return the gradient of a loss that was computed at the model's own weights."""
        weights = self._weights.learnable
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
        return self._weights.with_zero_frozen(dict(zip(weights, grads, strict=True)))

    def loss_and_grad(
        self,
        compute_loss: Callable[[], Tensor],
        at: ParamDict | None,
        factored: Mapping[str, Sequence[nn.Module]],
        *,
        statistics: bool,
    ) -> tuple[Tensor, Gradient]:
        """Run a forward and a backward pass.

        Args:
            compute_loss: The forward pass.
            at: Weights to use in place of the model's own.
            factored: Weights of linear layers, with the layers that use each, whose gradients may come as factors.
            statistics: Whether the forward pass may update running statistics.

        Returns:
            The loss, and the gradient by parameter name; 0 for frozen weights.
        """
        trainable = self._weights.trainable
        buffers = nullcontext() if statistics or not self._has_buffers else preserve_buffers(self._model)
        with swap_parameters(trainable, at), buffers:
            with record_linear_calls(factored) as recorded:
                loss = compute_loss()
            calls = {name: made for name, made in recorded.items() if self._use_factors(name, made)}
            dense = {name: p for name, p in self._weights.learnable.items() if name not in calls}
            wanted: list[Any] = [*dense.values(), *(call.output for made in calls.values() for call in made)]
            grads = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        gradient: dict[str, Tensor | FactoredGrad] = {
            name: torch.zeros_like(trainable[name]) for name in self._weights.frozen
        }
        for name, p in dense.items():
            gradient[name] = torch.zeros_like(p) if (g := next(grads)) is None else g
        for name, made in calls.items():
            product = outer_product(made, [next(grads) for _ in made], trainable[name].shape[0])
            gradient[name] = product.to(trainable[name].dtype)
        return loss.detach(), {name: gradient[name] for name in trainable}

    def _use_factors(self, name: str, calls: Sequence[LinearCall]) -> bool:
        """Whether a weight's gradient is cheaper as factors than as a product."""
        weight = self._weights.trainable[name]
        return (
            bool(calls)
            and name not in self._weights.frozen
            and not weight._backward_hooks  # the user's own, which must see the gradient
            and sum(call.rows for call in calls) < weight.shape[0]
        )
