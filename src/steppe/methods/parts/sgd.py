"""The step that methods take by default: SGD with momentum, reset at each task; and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.fast.factored import FactoredGrad, Gradient, ParamDict
from steppe.fast.matmul import plus_product
from steppe.network.growing_head import GrowingHead
from steppe.network.network import Network
from steppe.projection.memory import GradientMemory
from steppe.tensors.clipping import clip_ratio, clip_ratio_tensor

StepLimit = Callable[[ParamDict], ParamDict] | None
"""Takes the change of each weight by parameter name, and returns the changes to make."""


class MomentumSGD:
    """SGD with momentum on the network's weights, for gradients that a method has computed itself.

    Args:
        network: The network whose weights to move.
        lr: The learning rate at the start of each task.
        momentum: The momentum.

    Example:
        >>> import torch
        >>> from steppe.methods.parts.sgd import MomentumSGD
        >>> from steppe.network.network import Network
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> sgd = MomentumSGD(Network(model), lr=0.1, momentum=0.5)
        >>> for _ in range(2):  # steps of 0.1 · 1, then 0.1 · (0.5 · 1 + 1)
        ...     sgd.step({"weight": torch.ones(1, 2)})
        >>> model.weight.data
        tensor([[0.7500, 0.7500]])
    """

    def __init__(self, network: Network, lr: float, momentum: float) -> None:
        self._network, self._first_lr, self._momentum = network, lr, momentum
        self.restart()

    def restart(self) -> None:
        """Clear the momentum and reset the learning rate, at the start of a task."""
        self.lr = self._first_lr
        self._clear_velocity()

    def decay_lr(self, divisor: float) -> float:
        """Divide the learning rate until the next `restart`, and clear the momentum.

        Args:
            divisor: The number to divide by.

        Returns:
            The current learning rate.
        """
        self.lr /= divisor
        self._clear_velocity()
        return self.lr

    def _clear_velocity(self) -> None:
        self._velocity: ParamDict = {}
        self._weights: list[Tensor] = []  # the ones that move, in the order of the velocities
        self._velocities: list[Tensor] = []

    def grow_head(self, head: GrowingHead) -> None:
        """Extend the momentum of an output layer that has grown by zeros.

        Args:
            head: The layer.
        """
        if self._velocity:
            self._set_velocity({name: head.fit(name, velocity) for name, velocity in self._velocity.items()})

    def state_dict(self) -> State:
        """The learning rate and the momentum.

        Returns:
            The state.
        """
        return {"lr": self.lr, "velocity": self._velocity}

    def load_state_dict(self, state: State) -> None:
        """Restore a state, with the momentum laid out in memory like the weights.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If the momentum is not that of the weights that currently move.
        """
        self.lr, weights = float(state["lr"]), self._network.trainable
        saved = self._network.weights.like_weights(state["velocity"])
        if saved and saved.keys() != self._network.weights.learnable.keys():
            raise ValueError("the momentum does not match the trainable weights (were other weights frozen?)")
        self._clear_velocity()
        self._set_velocity({name: torch.zeros_like(weights[name]).copy_(v) for name, v in saved.items()})

    def step(
        self,
        gradient: Gradient,
        scale: float | Tensor = 1.0,
        *,
        outside: GradientMemory | None = None,
        coordinates: Gradient | None = None,
    ) -> None:
        """Take one step: V = momentum · V + scale · G;   W −= lr · V.

        Args:
            gradient: G by parameter name, dense or factored.
            scale: A factor on the gradient, such as that of `clip_factor`.
            outside: A memory that the gradient is projected out of first.
            coordinates: The gradient along the memory's bases, where it is known.
        """
        limit = None
        if outside is not None:
            gradient, limit = outside.project_out(gradient, coordinates), outside.limit_step
        if torch.is_grad_enabled():
            with torch.inference_mode():
                self._step(gradient, scale, limit)
        else:
            self._step(gradient, scale, limit)

    def _step(self, gradient: Gradient, scale: float | Tensor, limit: StepLimit) -> None:
        if not self._velocity:
            with torch.inference_mode(False):
                self._set_velocity(
                    {n: torch.zeros_like(w, requires_grad=False) for n, w in self._network.weights.learnable.items()}
                )
        if isinstance(scale, Tensor):  # on a device: reading it would wait for the device
            gradient, scale = scale_gradient(gradient, scale), 1.0
        moving, whole = [], []
        for name, velocity in self._velocity.items():
            g = gradient[name]
            if isinstance(g, FactoredGrad):  # add the product without forming it
                plus_product(velocity, g.left.t(), g.right, scale=scale, keep=self._momentum, out=velocity)
            else:
                moving.append(velocity)
                whole.append(g)
        if whole:
            torch._foreach_mul_(moving, self._momentum)
            torch._foreach_add_(moving, whole, alpha=scale)
        if limit is None:
            torch._foreach_add_(self._weights, self._velocities, alpha=-self.lr)
        else:
            changes = limit({name: -self.lr * velocity for name, velocity in self._velocity.items()})
            torch._foreach_add_(self._weights, list(changes.values()))

    def _set_velocity(self, velocity: ParamDict) -> None:
        velocities = list(velocity.values())
        weights: list[Tensor] = [self._network.trainable[name] for name in velocity]
        self._velocity, self._velocities, self._weights = velocity, velocities, weights


def clip_by_norm(gradient: Gradient, norm: float) -> Gradient:
    """Clip a gradient to a maximum norm over all parameters together.

    Args:
        gradient: The gradient by parameter name.
        norm: The maximum norm; 0 disables clipping.

    Returns:
        The gradient, scaled down if it was longer.
    """
    return scale_gradient(gradient, clip_factor(gradient, norm))


def clip_factor(gradient: Gradient, norm: float) -> float | Tensor:
    """The factor that clips a gradient to a maximum norm over all parameters together.

    Args:
        gradient: The gradient by parameter name.
        norm: The maximum norm; 0 disables clipping.

    Returns:
        A number on the CPU; a tensor on other devices, so that the CPU need not wait for them.
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
        return clip_ratio(math.sqrt(max(total, 0.0)), norm)  # rounding may leave it slightly negative
    total_square = torch.stack([*(length.square() for length in lengths), *squares]).sum()
    return clip_ratio_tensor(total_square.clamp(min=0).sqrt(), norm)


def scale_gradient(gradient: Gradient, factor: float | Tensor) -> Gradient:
    """The gradient times a number; of a factored one only the smaller factor is multiplied."""
    if isinstance(factor, float) and factor == 1.0:
        return gradient
    return {
        name: _scale_factors(g, factor) if isinstance(g, FactoredGrad) else g * factor for name, g in gradient.items()
    }


def _scale_factors(g: FactoredGrad, factor: float | Tensor) -> FactoredGrad:
    if g.left.numel() <= g.right.numel():
        return FactoredGrad(g.left * factor, g.right)
    return FactoredGrad(g.left, g.right * factor)
