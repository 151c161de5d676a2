"""The step all methods share: SGD with momentum on a given direction, started anew with each task."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.network.network import Network
from steppe.tensors.clipping import clip_ratio, clip_ratio_tensor
from steppe.tensors.factored import FactoredGrad, Gradient, ParamDict
from steppe.tensors.matmul import plus_product


class MomentumSGD:
    """SGD on the network's weights with gradients handed to it."""

    def __init__(self, network: Network, lr: float, momentum: float) -> None:
        self._network, self._first_lr, self._momentum = network, lr, momentum
        self.restart()

    def restart(self) -> None:
        """Forget the momentum, and begin with the first step size."""
        self.lr = self._first_lr
        self._stop()

    def decay_lr(self, divisor: float) -> float:
        """Divide the step size until the next restart, and forget the momentum; returns the step size now."""
        self.lr /= divisor
        self._stop()
        return self.lr

    def _stop(self) -> None:
        self._velocity: ParamDict = {}
        self._weights: list[Tensor] = []  # those that move, in the order of the velocities
        self._velocities: list[Tensor] = []

    def state_dict(self) -> State:
        """Step size and momentum."""
        return {"lr": self.lr, "velocity": self._velocity}

    def load_state_dict(self, state: State) -> None:
        """The same step size and momentum again, laid out in memory like the weights."""
        self.lr, weights = float(state["lr"]), self._network.trainable
        saved = self._network.like_weights(state["velocity"])
        if saved and saved.keys() != self._network.learnable.keys():
            raise ValueError("the momentum is not that of the weights that move (are others frozen than before?)")
        self._stop()
        self._go({name: torch.zeros_like(weights[name]).copy_(v) for name, v in saved.items()})

    def step(self, gradient: Gradient, scale: float | Tensor = 1.0) -> None:
        """V = momentum · V + scale · G;   W −= lr · V."""
        if torch.is_grad_enabled():
            with torch.inference_mode():
                self._step(gradient, scale)
        else:
            self._step(gradient, scale)

    def _step(self, gradient: Gradient, scale: float | Tensor) -> None:
        if not self._velocity:
            with torch.inference_mode(False):
                self._go({n: torch.zeros_like(w, requires_grad=False) for n, w in self._network.learnable.items()})
        if isinstance(scale, Tensor):  # on a device that nobody waits for
            gradient, scale = scaled(gradient, scale), 1.0
        moving, whole = [], []
        for name, velocity in self._velocity.items():
            g = gradient[name]
            if isinstance(g, FactoredGrad):  # the product of the factors goes straight into the sum
                plus_product(velocity, g.left.t(), g.right, scale=scale, keep=self._momentum, out=velocity)
            else:
                moving.append(velocity)
                whole.append(g)
        if whole:
            torch._foreach_mul_(moving, self._momentum)
            torch._foreach_add_(moving, whole, alpha=scale)
        torch._foreach_add_(self._weights, self._velocities, alpha=-self.lr)

    def _go(self, velocity: ParamDict) -> None:
        velocities = list(velocity.values())
        weights: list[Tensor] = [self._network.trainable[name] for name in velocity]
        self._velocity, self._velocities, self._weights = velocity, velocities, weights


def clipped(gradient: Gradient, norm: float) -> Gradient:
    """The gradient, shortened to the norm where it is longer; 0 means no clipping."""
    return scaled(gradient, clip_factor(gradient, norm))


def clip_factor(gradient: Gradient, norm: float) -> float | Tensor:
    """By what the gradient must be multiplied to be no longer than the norm, where 0 means no clipping: on a CPU a
    number, elsewhere a tensor, so that nobody waits for the device.
    """
    if norm == 0:
        return 1.0
    whole, squares = [], []
    for g in gradient.values():
        if isinstance(g, FactoredGrad):
            squares.append(g.squared_norm())
        else:
            whole.append(g)
    lengths = torch._foreach_norm(whole) if whole else ()
    if (lengths or squares)[0].is_cpu:
        total = sum([float(length) ** 2 for length in lengths]) + sum([float(square) for square in squares])
        return clip_ratio(math.sqrt(max(total, 0.0)), norm)  # never below 0 but by rounding
    total_square = torch.stack([*(length.square() for length in lengths), *squares]).sum()
    return clip_ratio_tensor(total_square.clamp(min=0).sqrt(), norm)


def scaled(gradient: Gradient, factor: float | Tensor) -> Gradient:
    """The gradient times a number; of factors only the smaller one is multiplied."""
    if isinstance(factor, float) and factor == 1.0:
        return gradient
    return {
        name: _scaled_factors(g, factor) if isinstance(g, FactoredGrad) else g * factor for name, g in gradient.items()
    }


def _scaled_factors(g: FactoredGrad, factor: float | Tensor) -> FactoredGrad:
    if g.left.numel() <= g.right.numel():
        return FactoredGrad(g.left * factor, g.right)
    return FactoredGrad(g.left, g.right * factor)
