"""The step all methods share: SGD with momentum on a given direction, started anew with each task."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.network import Network
from steppe.types import Gradient, Outer, multiplied


class Descent:
    """SGD on the network's weights with gradients handed to it."""

    def __init__(self, network: Network, lr: float, momentum: float) -> None:
        self._network, self._first_lr, self._momentum = network, lr, momentum
        self.restart()

    def restart(self) -> None:
        """Forget the momentum, and begin with the first step size."""
        self._begin(self._first_lr)

    def slow_down(self, divisor: float) -> float:
        """Divide the step size until the next restart, and forget the momentum; returns the step size now."""
        self._begin(self.lr / divisor)
        return self.lr

    def _begin(self, lr: float) -> None:
        self.lr = lr
        self._optimizer = torch.optim.SGD(
            self._network.parameters.values(),
            lr=lr,
            momentum=self._momentum,
            fused=self._network.device.type in ("cpu", "cuda"),  # one pass over the weights instead of three
        )

    def step(self, gradient: Gradient) -> None:
        """W −= lr · (momentum average of the gradients)."""
        for name, parameter in self._network.learnable.items():
            parameter.grad = multiplied(gradient[name])
        self._optimizer.step()
        self._optimizer.zero_grad()


def clipped(gradient: Gradient, norm: float) -> Gradient:
    """The gradient, shortened to the norm where it is longer; 0 means no clipping."""
    return gradient if norm == 0 else scaled(gradient, clip_factor(gradient, norm))


def clip_factor(gradient: Gradient, norm: float) -> Tensor:
    """By what the gradient must be multiplied to be no longer than the norm."""
    total = torch.stack([_squared_norm(g) for g in gradient.values()]).sum().sqrt()
    return (norm / (total + 1e-6)).clamp(max=1.0)


def scaled(gradient: Gradient, factor: Tensor) -> Gradient:
    """The gradient times a number; of factors only the smaller one is multiplied."""
    return {
        name: Outer(g.left * factor, g.right) if isinstance(g, Outer) else g * factor for name, g in gradient.items()
    }


def _squared_norm(g: Tensor | Outer) -> Tensor:
    return g.squared_norm() if isinstance(g, Outer) else torch.linalg.vector_norm(g).square()
