"""Avalanche: a plugin that protects earlier experiences. Plugins need no base class, so nothing is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from steppe.custom_loop.batches import Forward
from steppe.custom_loop.gradient_memory import GradientProjectionMemory
from steppe.custom_loop.projected_optimizer import ProjectedOptimizer
from steppe.integrations.protection import protected, require_memory
from steppe.tensors.nest import Nest


class GradientMemoryPlugin:
    """Keeps the steps of a strategy's optimizer outside a gradient memory, and updates it after each experience.

    Args:
        memory: The memory, of the strategy's model.
        batches: A function of the strategy that returns the batches to update the memory with; by default those of its
            data loader, without task labels.
        forward: Runs the model on a batch, as in `GradientProjectionMemory.update`.
        max_samples: How many samples to update the memory with; by default all.

    Attributes:
        memory: The memory.

    Raises:
        UsageError: An argument is invalid.

    Example:
        >>> import steppe, torch
        >>> model = torch.nn.Linear(8, 2)
        >>> plugin = GradientMemoryPlugin(steppe.GradientProjectionMemory(model), max_samples=300)
    """

    def __init__(
        self,
        memory: GradientProjectionMemory,
        *,
        batches: Callable[[Any], Iterable[Nest]] | None = None,
        forward: Forward | None = None,
        max_samples: int | None = None,
    ) -> None:
        self.memory = require_memory(memory)
        self._batches, self._forward, self._max_samples = batches, forward, max_samples

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Wrap the optimizer: anew each time, as growing layers replace its parameters."""
        optimizer = strategy.optimizer
        if isinstance(optimizer, ProjectedOptimizer) and optimizer.memory is self.memory:
            optimizer = optimizer.optimizer
        strategy.optimizer = protected(self.memory, optimizer)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Update the memory."""
        batches = _inputs(strategy) if self._batches is None else self._batches(strategy)
        self.memory.update(batches, self._forward, max_samples=self._max_samples)


def _inputs(strategy: Any) -> Iterator[Nest]:
    for batch in strategy.dataloader:
        yield batch[0]
