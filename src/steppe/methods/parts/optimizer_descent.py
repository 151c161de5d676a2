"""Steps by an optimizer of the user's, kept outside a gradient memory.

With Δ the step that the optimizer would take from w, and P = M diag(λ) Mᵀ of the memory:

    w ← w + Δ (I − P)

Δ itself is projected, not the gradient: what Adam, weight decay or momentum make of a projected gradient would lead
back into the span of M. For SGD without momentum both are the same.

The optimizer runs on copies of the weights. The weights themselves change in a single call at the end, so an exception
within a step leaves them as they were; the optimizer's state, which it may have split, then starts anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from steppe.checkpoint.tree import State
from steppe.errors import UsageError
from steppe.fast.factored import Gradient, to_dense
from steppe.network.growing_head import GrowingHead
from steppe.network.network import Network
from steppe.network.optimizer_choice import OptimizerChoice, call_factory
from steppe.projection.memory import GradientMemory


@dataclass(frozen=True)
class _Running:
    """An optimizer and what it works on: copies of the weights, with gradients of their own."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    weights: dict[str, Tensor]
    copies: dict[str, nn.Parameter]
    gradients: dict[str, Tensor]  # of those that learn

    @property
    def groups(self) -> list[list[str]]:
        """The names of each group's weights."""
        names = {id(copy): name for name, copy in self.copies.items()}
        return [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    def moments(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of each weight."""
        return {name: dict(self.optimizer.state[p]) for name, p in self.copies.items() if p in self.optimizer.state}


class OptimizerDescent:
    """Takes a method's steps with a new optimizer for each task.

    Args:
        network: The network whose weights to move.
        choice: How to make the optimizer.

    Attributes:
        name: The optimizer's class.

    Raises:
        UsageError: The optimizer cannot be made, or has parameters that are not the model's.

    Example:
        >>> import torch
        >>> from steppe.methods.parts.optimizer_descent import OptimizerDescent
        >>> from steppe.network.network import Network
        >>> from steppe.network.optimizer_choice import OptimizerChoice
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> descent = OptimizerDescent(Network(model), OptimizerChoice(lambda params: torch.optim.SGD(params, lr=0.1)))
        >>> descent.step({"weight": torch.tensor([[1.0, 2.0]])})
        >>> model.weight.data
        tensor([[0.9000, 0.8000]])
    """

    def __init__(self, network: Network, choice: OptimizerChoice) -> None:
        self._network, self._choice = network, choice
        self._divisor = 1.0  # of the learning rates
        self._kept: dict[str, dict[str, Any]] = {}  # moments of the last task, if they carry over
        self._running: _Running | None = None
        self._is_whole = True  # the state of what is running; not during a step
        self.name = type(self._start().optimizer).__name__  # fail now, not in the first step

    def restart(self) -> None:
        """Reset the learning rates; clear the state too, unless it is to be kept. The next step makes an optimizer."""
        self._divisor = 1.0
        self._stop()

    def decay_lr(self, divisor: float) -> float:
        """Divide the learning rates until the next `restart`, and clear the state, unless it is to be kept.

        Args:
            divisor: The number to divide by.

        Returns:
            The largest learning rate.
        """
        self._divisor *= divisor
        self._stop()
        return self.lr

    @property
    def lr(self) -> float:
        """The largest learning rate of all groups."""
        return max(float(group["lr"]) for group in self._start().optimizer.param_groups)

    def _stop(self) -> None:
        """Drop the optimizer, and keep what carries over."""
        if self._running is not None:
            self._kept = self._running.moments() if self._choice.keep_state and self._is_whole else {}
        self._running, self._is_whole = None, True

    def _start(self) -> _Running:
        """The running optimizer; a new one if there is none."""
        if self._running is None:
            with torch.inference_mode(False), torch.enable_grad():
                self._running = self._make()
            self._kept = {}  # now in the optimizer
        return self._running

    def _make(self) -> _Running:
        weights: dict[str, Tensor] = dict(self._network.trainable)
        copies = {name: nn.Parameter(w.detach().clone()) for name, w in weights.items()}
        optimizer = self._choice.make_optimizer(list(self._network.trainable.values()))
        _move(optimizer, {id(w): copies[name] for name, w in weights.items()}, self._network.model)
        for name, moments in self._kept.items():
            if name in copies and all(_fits(value, copies[name]) for value in moments.values()):
                optimizer.state[copies[name]] = dict(moments)
        self._divide(optimizer)
        scheduler = self._choice.make_scheduler(optimizer)
        gradients = {name: torch.zeros_like(copies[name]) for name in self._network.weights.learnable}
        for name, gradient in gradients.items():
            copies[name].grad = gradient
        return _Running(optimizer, scheduler, weights, copies, gradients)

    def _divide(self, optimizer: Optimizer) -> None:
        if self._divisor == 1.0:
            return
        for group in optimizer.param_groups:
            if "lr" not in group:
                raise UsageError(
                    f"{type(optimizer).__name__} has no learning rate to decay; use learn(..., patience=0)."
                )
            group["lr"] = group["lr"] / self._divisor

    def grow_head(self, head: GrowingHead) -> None:
        """Extend the state of an output layer that has grown by zeros, or let it start anew where it has other shapes.

        Args:
            head: The layer.
        """
        self._kept = {name: _grown(head, name, moments) for name, moments in self._kept.items()}
        running = self._running
        for name, parameter in head.parameters.items():
            if running is None or name not in running.copies or running.copies[name].shape == parameter.shape:
                continue
            copy = running.copies[name]
            state = _grown(head, name, running.optimizer.state.get(copy, {}))
            copy.grad = None
            with torch.inference_mode(False):
                copy.data = parameter.detach().clone()
                if name in running.gradients:
                    copy.grad = running.gradients[name] = torch.zeros_like(copy)
            running.optimizer.state[copy] = state

    def step(
        self,
        gradient: Gradient,
        scale: float | Tensor = 1.0,
        *,
        outside: GradientMemory | None = None,
        coordinates: Gradient | None = None,
    ) -> None:
        """Take one step of the optimizer, and one of the scheduler.

        Args:
            gradient: The gradient by parameter name, dense or factored.
            scale: A factor on it, such as that of `clip_factor`.
            outside: A memory that the step must stay outside of.
            coordinates: Not used: they are those of the gradient, not of the step.

        Raises:
            UsageError: The optimizer or the scheduler fails.
        """
        if not self._is_whole:  # the last step was split
            self._stop()
        with torch.inference_mode(False), torch.no_grad():
            running = self._start()
            self._is_whole = False
            new = self._stepped(running, gradient, scale, outside)
            torch._foreach_copy_(list(running.weights.values()), new)  # in one call, which no exception splits
            if running.scheduler is not None:
                call_factory("scheduler", running.scheduler.step)
            self._is_whole = True

    def _stepped(
        self, running: _Running, gradient: Gradient, scale: float | Tensor, outside: GradientMemory | None
    ) -> list[Tensor]:
        """The weights after a step."""
        weights, copies = list(running.weights.values()), list[Tensor](running.copies.values())
        torch._foreach_copy_(copies, weights)
        gradients = list(running.gradients.values())
        torch._foreach_copy_(gradients, [to_dense(gradient[name]) for name in running.gradients])
        if isinstance(scale, Tensor) or scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        with torch.enable_grad():  # as in a user's loop; optimizers turn it off themselves
            call_factory("optimizer", running.optimizer.step)
        if not outside:
            return copies
        steps = dict(zip(running.weights, torch._foreach_sub(copies, weights), strict=True))
        projected = {name: to_dense(step) for name, step in outside.project_out(steps).items()}
        changed = set(outside.projectors)
        if outside.limit_step is not None:
            limited = outside.limit_step(projected)
            changed |= {name for name, step in limited.items() if step is not projected[name]}
            projected = limited
        return [
            weights[place] + projected[name] if name in changed else copies[place]
            for place, name in enumerate(running.weights)
        ]

    def state_dict(self) -> State:
        """The optimizer's and the scheduler's state.

        Returns:
            The state.
        """
        running = self._running if self._is_whole else None
        return {
            "optimizer": self.name,
            "divisor": self._divisor,
            "kept": self._kept,
            "groups": None if running is None else running.groups,
            "running": None if running is None else running.optimizer.state_dict(),
            "scheduler": None if running is None or running.scheduler is None else running.scheduler.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`.

        Raises:
            UsageError: If the optimizer has other groups, or there is a scheduler in only one of both.
        """
        self._running, self._is_whole = None, True
        self._divisor, self._kept = float(state["divisor"]), state["kept"]
        if state["running"] is None:
            return
        running = self._start()
        if running.groups != state["groups"] or (running.scheduler is None) != (state["scheduler"] is None):
            raise UsageError(
                "the learner was saved within a task that was learned with another optimizer or scheduler; pass the "
                "same ones to resume it."
            )
        for fresh, saved in zip(running.optimizer.param_groups, state["running"]["param_groups"], strict=True):
            saved.update({key: _like(fresh[key], value) for key, value in saved.items() if key in fresh})
        running.optimizer.load_state_dict(state["running"])
        for p in running.copies.values():
            _lay_out(running.optimizer, p)
        if running.scheduler is not None:
            fresh = running.scheduler.state_dict()
            saved = {key: _like(fresh.get(key), value) for key, value in state["scheduler"].items()}
            running.scheduler.load_state_dict(saved)


def _move(optimizer: Optimizer, copies: Mapping[int, nn.Parameter], model: nn.Module) -> None:
    """Let an optimizer work on copies instead of the model's parameters; frozen parameters leave it."""
    own = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in own:
                raise UsageError(
                    f"`optimizer` has a parameter of shape {tuple(p.shape)} that is not one of the model's; make it of "
                    "the parameters it is called with, or of learner.model's."
                )
        group["params"] = [copies[id(p)] for p in group["params"] if id(p) in copies]
    state: dict[Tensor, Any] = {copies[id(p)]: values for p, values in optimizer.state.items() if id(p) in copies}
    optimizer.state.clear()
    optimizer.state.update(state)


def _fits(value: Any, weight: Tensor) -> bool:
    """Whether a part of the state can be that of a weight, which may have grown since."""
    return not isinstance(value, Tensor) or value.ndim == 0 or value.shape == weight.shape


def _grown(head: GrowingHead, name: str, moments: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a weight with new rows of zeros if the weight is a growing head's; none if that has other shapes."""
    parameter = head.parameters.get(name)
    if parameter is None:
        return dict(moments)
    shapes = {value.shape for value in moments.values() if isinstance(value, Tensor) and value.ndim}
    if any(len(shape) != parameter.ndim or shape[1:] != parameter.shape[1:] for shape in shapes) or len(shapes) > 1:
        return {}
    return {
        key: head.fit(name, value) if isinstance(value, Tensor) and value.ndim else value
        for key, value in moments.items()
    }


def _like(fresh: Any, saved: Any) -> Any:
    """A value from a file, which has lists for tuples and dictionaries for counters, with the type of a fresh one."""
    if isinstance(fresh, tuple):
        return tuple(saved)
    return Counter(saved) if isinstance(fresh, Counter) else saved


def _lay_out(optimizer: Optimizer, p: nn.Parameter) -> None:
    """Lay the state of a weight out in memory like the weight, and keep counts of steps where the optimizer does."""
    group = next((group for group in optimizer.param_groups if any(p is other for other in group["params"])), {})
    on_device = group.get("capturable") or group.get("fused")
    for key, value in optimizer.state.get(p, {}).items():
        if isinstance(value, Tensor) and value.shape == p.shape and value.ndim:
            optimizer.state[p][key] = torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
        elif isinstance(value, Tensor) and key == "step" and not on_device:
            optimizer.state[p][key] = value.cpu()
