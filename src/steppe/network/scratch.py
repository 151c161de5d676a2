"""Memory that updates reuse: allocating it anew would cost more than the arithmetic done in it."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.fast.factored import FactoredGrad, Gradient, ParamDict
from steppe.fast.matmul import plus_product
from steppe.network.weights import Weights


class Scratch:
    """One tensor of each weight's shape, and scalars as tensors. Its content is only valid until the next use."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._tensors: ParamDict = {}
        self._scalars: dict[float, Tensor] = {}

    def forget(self) -> None:
        """Forget the tensors, because the weights have other shapes now."""
        self._tensors = {}

    def tensor(self, name: str) -> Tensor:
        """Return the scratch tensor of a weight's shape, always the same one."""
        if not self._tensors:
            with torch.inference_mode(False):
                self._tensors = {
                    each: torch.empty_like(p, requires_grad=False) for each, p in self._weights.trainable.items()
                }
        return self._tensors[name]

    @torch.no_grad()
    def perturbed(self, step: Gradient, scale: float = 1.0, *, onward: bool = False) -> ParamDict:
        """Return the weights w + scale · step, in scratch memory.

        Args:
            step: A direction for some of the weights, dense or factored.
            scale: What to multiply it by.
            onward: Start from the result of the last call instead of w.
        """
        for name, d in step.items():
            out = self.tensor(name)
            start = out if onward else self._weights.trainable[name]
            if isinstance(d, FactoredGrad):
                plus_product(start, d.left.t(), d.right, scale=scale, out=out)
            else:
                torch.add(start, d, alpha=scale, out=out)
        return self._tensors

    def scalar(self, value: float) -> Tensor:
        """Return a number as a tensor, always the same one: multiplying by a Python number costs twice as much."""
        if value not in self._scalars:
            with torch.inference_mode(False):
                self._scalars[value] = torch.tensor(value, dtype=self._weights.dtype, device=self._weights.device)
        return self._scalars[value]
