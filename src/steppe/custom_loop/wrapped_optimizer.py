"""An optimizer around another one: everything but the step is the other one's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steppe.errors import UsageError
from steppe.runtime.signals import BlockedSignals, signals_unblocked

Closure = Callable[[], Any]


class WrappedOptimizer(Optimizer):
    """An optimizer whose parameters, settings and state are those of another one.

    Schedulers, `GradScaler` and checkpoints therefore work as if it were that one.

    Args:
        optimizer: The other one.

    Attributes:
        optimizer: The other one.

    Raises:
        UsageError: It is not a `torch.optim.Optimizer`.
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"expected a torch.optim.Optimizer, such as torch.optim.AdamW(model.parameters()), "
                f"got {type(optimizer).__name__}."
            )
        self.__setstate__({"optimizer": optimizer})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # makes the dictionaries of hooks, as after unpickling
        self._warned_capturable_if_run_uncaptured = True

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the other optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the other optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of the other optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the other optimizer.

        Args:
            param_group: The group.
        """
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Set them to None instead of zero.
        """
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of the other optimizer: a checkpoint can be loaded with or without the wrapper.

        Returns:
            The state.
        """
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the other optimizer.

        Args:
            state_dict: A state from `state_dict`, of either optimizer.
        """
        self.optimizer.load_state_dict(state_dict)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the other optimizer.

        Args:
            hook: The hook.
            prepend: Whether it runs before those registered so far.

        Returns:
            A handle that removes it.
        """
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the other optimizer.

        Args:
            hook: The hook.
            prepend: Whether it runs before those registered so far.

        Returns:
            A handle that removes it.
        """
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the other optimizer.

        Args:
            hook: The hook.
            prepend: Whether it runs before those registered so far.

        Returns:
            A handle that removes it.
        """
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the other optimizer.

        Args:
            hook: The hook.
            prepend: Whether it runs before those registered so far.

        Returns:
            A handle that removes it.
        """
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)


def _of_the_other(name: str) -> property:
    """An attribute that `GradScaler` sets for the duration of a step, handed on to the optimizer that reads it."""

    def read(self: WrappedOptimizer) -> Any:
        return getattr(self.optimizer, name)

    def write(self: WrappedOptimizer, value: Any) -> None:
        setattr(self.optimizer, name, value)

    def remove(self: WrappedOptimizer) -> None:
        delattr(self.optimizer, name)

    return property(read, write, remove)


WrappedOptimizer.grad_scale = _of_the_other("grad_scale")  # type: ignore[attr-defined]
WrappedOptimizer.found_inf = _of_the_other("found_inf")  # type: ignore[attr-defined]


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Let Ctrl-C wait until the end, so that it does not split a step."""
    signals = BlockedSignals()
    try:
        signals.block()
        yield
    finally:
        signals.unblock()


def interruptible(closure: Closure) -> Closure:
    """The closure, within which Ctrl-C is handled at once."""

    def call() -> Any:
        with signals_unblocked():
            return closure()

    return call
