"""The weight step of a method: its own SGD with momentum, or the optimizer that the learner's user chose."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.fast.factored import Gradient
from steppe.methods.parts.optimizer_descent import OptimizerDescent
from steppe.methods.parts.sgd import MomentumSGD
from steppe.network.growing_head import GrowingHead
from steppe.network.network import Network
from steppe.projection.memory import GradientMemory


class Descent(Protocol):
    """Moves the network's weights, given gradients that a method has computed itself."""

    def restart(self) -> None:
        """Reset the learning rate and clear the momentum, at the start of a task."""
        ...

    def decay_lr(self, divisor: float) -> float:
        """Divide the learning rate until the next `restart`, clear the momentum, and return the learning rate."""
        ...

    def grow_head(self, head: GrowingHead) -> None:
        """Extend what has the shape of an output layer that has grown."""
        ...

    def step(
        self,
        gradient: Gradient,
        scale: float | Tensor = 1.0,
        *,
        outside: GradientMemory | None = None,
        coordinates: Gradient | None = None,
    ) -> None:
        """Take one step.

        Args:
            gradient: The gradient by parameter name, dense or factored.
            scale: A factor on it, such as that of `clip_factor`.
            outside: A memory that the step must stay outside of.
            coordinates: The gradient along the memory's bases, where it is known.
        """
        ...

    def state_dict(self) -> State:
        """The learning rate and the momentum."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore a state."""
        ...


def make_descent(network: Network, lr: float, momentum: float) -> Descent:
    """Make what takes a method's steps: the user's optimizer if there is one, else SGD with momentum.

    Args:
        network: The network whose weights to move.
        lr: The learning rate of SGD at the start of each task.
        momentum: The momentum of SGD.

    Returns:
        What to pass gradients to.
    """
    if network.optimizer is None:
        return MomentumSGD(network, lr, momentum)
    return OptimizerDescent(network, network.optimizer)
