"""Averaged weights for prediction: w̄ ← decay · w̄ + (1 − decay) · w after every update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from steppe.checkpoint.tree import State
from steppe.fast.factored import ParamDict
from steppe.network.growing_head import GrowingHead
from steppe.network.module_state import swap_parameters
from steppe.network.network import Network


class WeightAverage:
    """Keeps a moving average of the weights, which predicts while the weights themselves learn.

    While a task is learned the model holds the weights, and the average is kept here. Between tasks it is the other
    way round, so that the model predicts, and is saved, with the average.

    Args:
        network: The network.
        decay: The share of the average that stays with each update.

    Example:
        >>> import torch
        >>> from steppe.methods.parts.weight_average import WeightAverage
        >>> from steppe.network.network import Network
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(Network(model), decay=0.75)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> average.begin()
        >>> _ = torch.nn.init.ones_(model.weight)  # an update
        >>> average.step()
        >>> average.end()
        >>> model.weight.item()
        0.25
    """

    def __init__(self, network: Network, decay: float) -> None:
        self._network, self._decay = network, decay
        self._average: ParamDict = {}  # while a task is learned
        self._learning: ParamDict = {}  # between tasks: the weights that learn

    def begin(self) -> None:
        """Start a task: the weights learn on from where they were."""
        self._average = self._copies()
        if self._learning:
            self._set(self._learning)
        self._learning = {}

    def restart(self) -> None:
        """Start the average anew at the model's weights, after others were restored into the model."""
        if self._average:
            self._average = self._copies()

    def grow_head(self, head: GrowingHead) -> None:
        """Give an output layer that has grown its new rows' initial values.

        Args:
            head: The layer.
        """
        average, learning = (
            {name: head.extend(name, w, head.rows) if name in head.parameters else w for name, w in weights.items()}
            for weights in (self._average, self._learning)
        )
        self._average, self._learning = average, learning

    def step(self) -> None:
        """Move the average towards the weights."""
        weights = self._network.trainable
        average = list(self._average.values())
        with torch.inference_mode():
            torch._foreach_lerp_(average, [weights[name] for name in self._average], 1 - self._decay)

    def end(self) -> None:
        """End a task: the model takes the average, and its weights are kept for the next task."""
        if self._average:
            self._learning = self._copies()
            self._set(self._average)
            self._average = {}

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Inside, the model holds the average."""
        with swap_parameters(self._network.trainable, self._average or None):
            yield

    @contextmanager
    def weights_in_model(self) -> Iterator[None]:
        """Inside, the model holds the weights that learn."""
        with swap_parameters(self._network.trainable, self._learning or None):
            yield

    def _copies(self) -> ParamDict:
        return {name: weight.detach().clone() for name, weight in self._network.trainable.items()}

    @torch.no_grad()
    def _set(self, values: ParamDict) -> None:
        """Set all weights in one call, so that an interrupt is safe."""
        weights = self._network.trainable
        torch._foreach_copy_([weights[name] for name in values], list(values.values()))

    def state_dict(self) -> State:
        """The average while a task is learned, the weights that learn between tasks.

        Returns:
            The state.
        """
        return {"average": self._average, "learning": self._learning}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If its tensors are not like the weights.
        """
        loaded = [self._network.weights.like_weights(state[name]) for name in ("average", "learning")]
        if any(found and found.keys() != self._network.trainable.keys() for found in loaded):
            raise ValueError("the averaged weights do not match the trainable weights")
        trainable = self._network.trainable
        self._average, self._learning = (
            {name: torch.zeros_like(trainable[name], requires_grad=False).copy_(w) for name, w in found.items()}
            for found in loaded
        )

    def memory_bytes(self) -> int:
        """The memory of the second set of weights.

        Returns:
            Bytes.
        """
        return sum(w.nbytes for w in (self._average or self._learning).values())
