"""Which optimizer takes the steps of a method, if its user chose one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steppe.errors import SteppeError, UsageError, one_line, short_repr

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of the model's trainable parameters."""
SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Makes a scheduler of the optimizer's learning rates."""


@dataclass(frozen=True)
class OptimizerChoice:
    """Factories of an optimizer and its scheduler, which are called at the start of each task.

    Args:
        optimizer: Makes the optimizer.
        scheduler: Makes the scheduler, which steps after every update.
        keep_state: Whether moments carry over from task to task.

    Raises:
        UsageError: They are not functions.
    """

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None
    keep_state: bool = False

    def __post_init__(self) -> None:
        example = "lambda params: torch.optim.AdamW(params, lr=1e-3)"
        if isinstance(self.optimizer, (Optimizer, type)) or not callable(self.optimizer):
            raise UsageError(
                f"optimizer must be a function that makes one, such as {example}, got {short_repr(self.optimizer)}."
            )
        scheduler: object = self.scheduler
        if scheduler is not None and (isinstance(scheduler, (LRScheduler, type)) or not callable(scheduler)):
            raise UsageError(
                "scheduler must be a function that makes one, such as lambda optimizer: "
                f"torch.optim.lr_scheduler.StepLR(optimizer, 100), got {short_repr(scheduler)}."
            )
        if type(self.keep_state) is not bool:
            raise UsageError(f"keep_optimizer_state must be True or False, got {short_repr(self.keep_state)}.")

    def make_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Make an optimizer.

        Args:
            parameters: The model's trainable parameters.

        Returns:
            The optimizer.

        Raises:
            UsageError: The factory fails, or returns something that cannot take a step by itself.
        """
        optimizer: Any = call_factory("optimizer", self.optimizer, parameters)
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"`optimizer` must return a torch.optim.Optimizer, got {short_repr(optimizer)}.")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} evaluates the loss several times per step (it needs a closure), but a "
                "method computes its gradients itself; use another optimizer."
            )
        return optimizer

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make a scheduler of the optimizer, if there is one.

        Args:
            optimizer: The optimizer.

        Returns:
            The scheduler.

        Raises:
            UsageError: The factory fails, or returns something else.
        """
        if self.scheduler is None:
            return None
        scheduler: Any = call_factory("scheduler", self.scheduler, optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau needs a validation loss; leave out scheduler, and use learn(..., patience=N)."
            )
        if not isinstance(scheduler, LRScheduler):
            raise UsageError(
                f"`scheduler` must return a torch.optim.lr_scheduler.LRScheduler, got {short_repr(scheduler)}."
            )
        return scheduler


def call_factory(name: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call the user's function; raise UsageError with its name if it fails."""
    try:
        return function(*given)
    except SteppeError:
        raise
    except Exception as error:
        raise UsageError(f"`{name}` failed: {type(error).__name__}: {one_line(error)}") from error
