"""What the adapters of training loops share: wrapping an optimizer once, and one memory in all processes."""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from steppe.custom_loop.gradient_memory import GradientProjectionMemory
from steppe.custom_loop.projected_optimizer import ProjectedOptimizer
from steppe.custom_loop.wrapped_optimizer import WrappedOptimizer
from steppe.errors import UsageError, short_repr


def require_memory(memory: object) -> GradientProjectionMemory:
    """Check an adapter's first argument.

    Args:
        memory: The argument.

    Returns:
        The memory.

    Raises:
        UsageError: It is something else.
    """
    if not isinstance(memory, GradientProjectionMemory):
        raise UsageError(
            f"memory must be a steppe.GradientProjectionMemory, got {short_repr(memory)}; make it with "
            "steppe.GradientProjectionMemory(model)."
        )
    return memory


def protected(memory: GradientProjectionMemory, optimizer: Optimizer) -> Optimizer:
    """Wrap an optimizer, unless it is wrapped by this memory already.

    Args:
        memory: The memory.
        optimizer: The optimizer, wrapped or not.

    Returns:
        An optimizer whose steps stay outside the memory.
    """
    inner = optimizer
    while isinstance(inner, WrappedOptimizer):
        if isinstance(inner, ProjectedOptimizer) and inner.memory is memory:
            return optimizer
        inner = inner.optimizer
    return memory.wrap(optimizer)


def share_between_processes(memory: GradientProjectionMemory) -> None:
    """Let later updates of the memory give all processes of a distributed run the memory of the first.

    Args:
        memory: The memory, made from a model that was not distributed yet.
    """
    if memory.process_group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        memory.process_group = dist.group.WORLD
