"""Flattened sharpness (SAM-like) for any loss and optimizer: climb within the memory, then step from where it began.

After the ascent (`perturbation.py`) the base optimizer steps from w with the gradient at w + v.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steppe.custom_loop.gradient_memory import GradientProjectionMemory
from steppe.custom_loop.perturbation import AscentForm, Perturbation
from steppe.custom_loop.projected_optimizer import ProjectedOptimizer
from steppe.custom_loop.wrapped_optimizer import Closure, WrappedOptimizer, blocked_signals, interruptible
from steppe.errors import UsageError, short_repr
from steppe.network.module_state import preserve_buffers


class FlatSharpness(WrappedOptimizer):
    """An optimizer that steps with the gradient at weights perturbed uphill within a gradient memory.

    Either pass a closure to `step`, or call `first_step` and `second_step` after a backward pass each. A closure
    clears the gradients, computes the loss, calls `backward` and returns the loss.

    Args:
        optimizer: The optimizer that steps: usually one from `memory.wrap`, or any of torch.
        memory: The memory within which to climb; by default that of the wrapped optimizer, if it has one.
        radius: The length ρ of the perturbation over all weights together (SAM). 0.05 if `lr` is not given either.
        lr: The step size of an ascent step instead (FS-DGPM's η1).
        steps: The number of ascent steps K.
        clamp: With `lr`, the bound on each element of a projected gradient; None for no bound.
        clip: The maximum norm of the gradient before the step; 0 disables clipping.
        model: The model whose running statistics should move once per update; by default the memory's.

    Attributes:
        optimizer: The optimizer that steps.
        memory: The memory, or None.

    Raises:
        UsageError: An argument is invalid.

    Example:
        >>> import steppe, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> memory = steppe.GradientProjectionMemory(model)
        >>> optimizer = steppe.FlatSharpness(memory.wrap(torch.optim.SGD(model.parameters(), lr=0.1)), radius=0.05)
        >>> x, y = torch.randn(10, 4), torch.arange(10) % 2
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> losses = [optimizer.step(closure).item() for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
    """

    memory: GradientProjectionMemory | None

    def __init__(
        self,
        optimizer: Optimizer,
        memory: GradientProjectionMemory | None = None,
        *,
        radius: float | None = None,
        lr: float | None = None,
        steps: int = 1,
        clamp: float | None = 2.0,
        clip: float = 0.0,
        model: nn.Module | None = None,
    ) -> None:
        if isinstance(optimizer, FlatSharpness):
            raise UsageError("the optimizer is a FlatSharpness already; pass the optimizer that it was made from.")
        super().__init__(optimizer)
        self.memory = _memory_of(optimizer, memory)
        self.form = _ascent_form(radius, lr, steps, clamp)
        if not isinstance(clip, (int, float)) or not clip >= 0:
            raise UsageError(f"clip = {short_repr(clip)} is out of range; it must be at least 0.")
        self.clip = clip
        self.model = model if model is not None or self.memory is None else self.memory.model

    def __getstate__(self) -> dict[str, Any]:
        names = ("memory", "form", "clip", "model")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._perturbation: Perturbation | None = None

    @property
    def is_perturbed(self) -> bool:
        """Whether the weights are at w + v, between the first and the second step."""
        return self._perturbation is not None

    def step(self, closure: Closure | None = None, ascent_closure: Closure | None = None) -> Any:
        """Make one update.

        Running statistics (BatchNorm) move in the last forward only.

        Args:
            closure: Computes the loss and its gradients.
            ascent_closure: Does so for the ascent, if that is to climb another loss, such as that of the new batch
                without replay. By default it is `closure`.

        Returns:
            The loss at w + v. None without a closure, if `first_step` was called: then this is `second_step`.

        Raises:
            UsageError: Called without a closure before `first_step`.
        """
        if closure is None:
            if not self.is_perturbed:
                raise UsageError(
                    "pass a closure that computes the loss and its gradients, or call first_step() after a backward "
                    "pass, and second_step() after another."
                )
            self.second_step()
            return None
        climb = interruptible(closure if ascent_closure is None else ascent_closure)
        with blocked_signals():
            try:
                for _ in range(self.form.steps):
                    with torch.enable_grad(), self._preserved_buffers():
                        climb()
                    self._ascend(None)
                with torch.enable_grad():
                    loss = interruptible(closure)()
            except BaseException:
                self._put_back()
                raise
            self.restore()
            self._descend()
        return loss

    def first_step(self, *, zero_grad: bool = False, grad_scale: float | Tensor | None = None) -> None:
        """Climb one ascent step with the gradients of a backward pass; call it as often as `steps` says.

        Running statistics (BatchNorm) move in the forward before the first call only. If the update is abandoned, call
        `restore`.

        Args:
            zero_grad: Clear the gradients afterwards.
            grad_scale: What the loss was multiplied by, such as `scaler.get_scale()`. Gradients that overflowed do not
                move anything.
        """
        with blocked_signals():
            self._ascend(grad_scale)
            if self._perturbation is not None and self.model is not None:
                self._perturbation.hold_buffers(self.model)
        if zero_grad:
            self.zero_grad()

    def second_step(self, *, zero_grad: bool = False) -> None:
        """Step with the gradients of a backward pass at the perturbed weights.

        Args:
            zero_grad: Clear the gradients afterwards.
        """
        with blocked_signals():
            self.restore()
            self._descend()
        if zero_grad:
            self.zero_grad()

    def restore(self, *, grad_scale: float | Tensor | None = None) -> None:
        """Put the weights back, and update learned importances; `second_step` without the step.

        Use it to step by other means: `flat.restore(); scaler.step(flat.optimizer)`. It does nothing while the weights
        are not perturbed.

        Args:
            grad_scale: What the loss was multiplied by, such as `scaler.get_scale()`.
        """
        if self._perturbation is None:
            return
        with blocked_signals():
            gradients = self._perturbation.importance_gradients(grad_scale)
            self._put_back()
            if self.memory is not None and gradients:
                self.memory.update_importances(gradients)

    def _ascend(self, grad_scale: float | Tensor | None) -> None:
        if self._perturbation is None:
            self._perturbation = Perturbation(self.param_groups, self.memory)
        self._perturbation.ascend(self.form, grad_scale)

    def _put_back(self) -> None:
        if self._perturbation is not None:
            self._perturbation.undo()
            self._perturbation = None

    def _descend(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.clip)
        self.optimizer.step()

    def _preserved_buffers(self) -> AbstractContextManager[None]:
        return nullcontext() if self.model is None else preserve_buffers(self.model)


def _memory_of(optimizer: Optimizer, memory: GradientProjectionMemory | None) -> GradientProjectionMemory | None:
    """The memory to climb in."""
    if memory is not None and not isinstance(memory, GradientProjectionMemory):
        raise UsageError(f"memory must be a GradientProjectionMemory, got {short_repr(memory)}.")
    if not isinstance(optimizer, ProjectedOptimizer):
        return memory
    own = optimizer.memory
    assert isinstance(own, GradientProjectionMemory)
    if memory is not None and memory is not own:
        raise UsageError("the optimizer was wrapped by another memory; pass that one, or leave `memory` out.")
    return own


def _ascent_form(radius: float | None, lr: float | None, steps: int, clamp: float | None) -> AscentForm:
    if radius is not None and lr is not None:
        raise UsageError("pass either `radius` (SAM) or `lr` (FS-DGPM), not both.")
    for name, value in (("radius", radius), ("lr", lr), ("clamp", clamp)):
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise UsageError(f"{name} = {short_repr(value)} is out of range; it must be above 0.")
    if type(steps) is not int or steps < 1:
        raise UsageError(f"steps = {short_repr(steps)} is out of range; it must be at least 1.")
    return AscentForm(0.05 if radius is None and lr is None else radius, lr, steps, clamp)
