"""The step all methods share: SGD with momentum on a given direction, started anew with each task."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.network import Network
from steppe.types import Gradient, Outer, multiplied


class Descent:
    """SGD on the network's weights with gradients handed to it."""

    def __init__(self, network: Network, lr: float, momentum: float) -> None:
        self._network, self._lr, self._momentum = network, lr, momentum
        self.restart()

    def restart(self) -> None:
        """Forget the momentum."""
        self._optimizer = torch.optim.SGD(self._network.parameters.values(), lr=self._lr, momentum=self._momentum)

    def step(self, gradient: Gradient) -> None:
        """W −= lr · (momentum average of the gradients)."""
        for name, parameter in self._network.parameters.items():
            parameter.grad = multiplied(gradient[name])
        self._optimizer.step()
        self._optimizer.zero_grad()


def clipped(gradient: Gradient, norm: float) -> Gradient:
    """The gradient, shortened to the norm where it is longer; 0 means no clipping."""
    if norm == 0:
        return gradient
    total = torch.stack([_squared_norm(g) for g in gradient.values()]).sum().sqrt()
    factor = (norm / (total + 1e-6)).clamp(max=1.0)
    return {
        name: Outer(g.left * factor, g.right) if isinstance(g, Outer) else g * factor for name, g in gradient.items()
    }


def _squared_norm(g: Tensor | Outer) -> Tensor:
    return g.squared_norm() if isinstance(g, Outer) else torch.linalg.vector_norm(g).square()
