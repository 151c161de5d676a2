"""An optimizer whose steps stay outside a gradient memory.

With w the weights before a step of the base optimizer, w + Δ those after it, and P = M diag(λ) Mᵀ of the memory:

    w ← w + Δ (I − P)

Projecting the gradient instead is not enough: Adam divides it by a root mean square of each element, Muon
orthogonalizes it, and weight decay is added to it. All of these lead back into the span of M.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steppe.custom_loop.wrapped_optimizer import Closure, WrappedOptimizer, blocked_signals, interruptible
from steppe.errors import UsageError, unknown_name
from steppe.fast.factored import ParamDict, to_dense
from steppe.projection.memory import Projector

MODES = ("step", "gradient", "both")
StepLimit = Callable[[ParamDict], ParamDict]
"""Takes the change of each weight by parameter name, and returns the changes to make."""


class Memory(Protocol):
    """What the optimizer needs of a gradient memory."""

    model: nn.Module
    version: int

    @property
    def projectors(self) -> Mapping[str, Projector]:
        """The projectors, by parameter name."""
        ...

    @property
    def limit_step(self) -> StepLimit | None:
        """What the change of weights with weight normalization must be passed through; None if there are none."""
        ...

    def normalized(self) -> list[str]:
        """The directions and scales of weights with weight normalization."""
        ...

    def frozen(self) -> list[str]:
        """The weights that must not move at all."""
        ...


class ProjectedOptimizer(WrappedOptimizer):
    """An optimizer whose steps stay outside a gradient memory; made by `GradientProjectionMemory.wrap`.

    From the memory's first update on, each step keeps one copy of the covered weights.

    Args:
        optimizer: The base optimizer, over parameters of the memory's model.
        memory: The memory.
        project: What to project: "step", "gradient" or "both".

    Attributes:
        optimizer: The base optimizer.
        memory: The memory.

    Raises:
        UsageError: The base is not an optimizer, is wrapped already, or has parameters that are not the model's.

    Example:
        >>> import steppe, torch
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> memory = steppe.GradientProjectionMemory(model, threshold=1.0)
        >>> optimizer = memory.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
        >>> old = torch.randn(3, 4)  # the inputs of the first task
        >>> memory.update(old)
        >>> before = model(old)
        >>> model(torch.randn(5, 4)).sum().backward()
        >>> optimizer.step()
        >>> bool((model(old) - before).abs().max() < 1e-5)
        True
    """

    def __init__(self, optimizer: Optimizer, memory: Memory, *, project: str = "step") -> None:
        if project not in MODES:
            raise unknown_name("project", project, MODES)
        if isinstance(optimizer, WrappedOptimizer):
            raise UsageError(
                f"the optimizer is a {type(optimizer).__name__}; wrap the innermost optimizer, once: "
                "memory.wrap(torch.optim.AdamW(...))."
            )
        super().__init__(optimizer)
        self.memory, self._project = memory, project
        self._require_own(optimizer.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "memory": self.memory, "_project": self._project}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._parts: _Parts | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the base optimizer.

        Args:
            param_group: The group, with parameters of the memory's model.
        """
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        self._require_own([{"params": [p[1] if isinstance(p, tuple) else p for p in params]}])  # may be named
        self.optimizer.add_param_group({**param_group, "params": params})
        self._parts = None

    def _require_own(self, groups: list[dict[str, Any]]) -> None:
        own = {id(p) for p in self.memory.model.parameters()}
        foreign = [p for group in groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise UsageError(
                f"{len(foreign)} of the optimizer's parameters (the first of shape {tuple(foreign[0].shape)}) do not "
                "belong to the memory's model, so their steps would not be protected: make the optimizer from "
                "model.parameters() of the same model, or make the memory of a module that holds them all."
            )

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step of the base optimizer, outside the memory.

        Args:
            closure: Computes the loss and its gradients, if the base optimizer needs one.

        Returns:
            What the base optimizer returns.
        """
        parts = self._current_parts()
        if parts.is_empty:
            with torch.enable_grad():
                return self._base_step(closure)
        with blocked_signals():
            if closure is not None:
                closure = interruptible(closure)
            if self._project != "step":
                closure = self._projecting_gradients(parts, closure)
            parts.remember()
            try:
                with torch.enable_grad():
                    return self._base_step(closure)
            finally:  # also after an error: whatever has moved stays outside the memory
                parts.correct(steps=self._project != "gradient")

    def _base_step(self, closure: Closure | None) -> Any:
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def _projecting_gradients(self, parts: _Parts, closure: Closure | None) -> Closure | None:
        """Project the gradients: now, or each time that the closure has computed them."""
        if closure is None:
            parts.project_gradients()
            return None

        def call() -> Any:
            with torch.enable_grad():
                loss = closure()
            parts.project_gradients()
            return loss

        return call

    def _current_parts(self) -> _Parts:
        version = (self.memory.version, len(self.param_groups))
        if self._parts is None or self._parts.version != version:
            self._parts = _Parts(self, version)
        return self._parts


class _Parts:
    """The weights of an optimizer that a memory holds, with room for their values before a step."""

    def __init__(self, optimizer: ProjectedOptimizer, version: tuple[int, int]) -> None:
        self.version = version
        memory = optimizer.memory
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        everything = dict(memory.model.named_parameters())
        weights = {name: p for name, p in everything.items() if id(p) in own}
        self._projectors: list[tuple[Tensor, Projector]] = [
            (weights[name], p) for name, p in memory.projectors.items() if name in weights
        ]
        self._frozen: list[Tensor] = [weights[name] for name in memory.frozen() if name in weights]
        self._limit = memory.limit_step
        # Both parts of a normalized weight, even if the optimizer moves only one of them.
        self._normalized: dict[str, Tensor] = {name: everything[name] for name in memory.normalized()}
        if not weights.keys() & self._normalized.keys():
            self._normalized.clear()
        self._weights: list[Tensor] = [weight for weight, _ in self._projectors] + self._frozen
        self._weights += self._normalized.values()
        self._before: list[Tensor] = []

    @property
    def is_empty(self) -> bool:
        return not self._weights

    def remember(self) -> None:
        """Copy the weights."""
        pairs = zip(self._before, self._weights, strict=False)
        if len(self._before) != len(self._weights) or any(b.device != w.device or b.dtype != w.dtype for b, w in pairs):
            self._before = [torch.empty_like(weight, requires_grad=False) for weight in self._weights]
        torch._foreach_copy_(self._before, self._weights)

    def correct(self, *, steps: bool) -> None:
        """Take the memory's directions out of what the weights have moved since, and put frozen weights back."""
        if steps:
            for (weight, projector), before in zip(self._projectors, self._before, strict=False):
                weight.sub_(_held(projector, weight - before))
            if self._limit is not None and self._normalized:
                self._pass_limit(self._limit)
        if self._frozen:
            start = len(self._projectors)
            torch._foreach_copy_(self._frozen, self._before[start : start + len(self._frozen)])

    def _pass_limit(self, limit: StepLimit) -> None:
        """Project what the steps of directions and scales change of the weights that are computed from them."""
        weights, before = list(self._normalized.values()), self._before[-len(self._normalized) :]
        changes = dict(zip(self._normalized, torch._foreach_sub(weights, before), strict=True))
        torch._foreach_copy_(weights, before)  # the limit is about the change from where the weights were
        torch._foreach_add_(weights, list(limit(changes).values()))

    def project_gradients(self) -> None:
        """Take the memory's directions out of the gradients."""
        for weight, projector in self._projectors:
            if weight.grad is not None:
                if weight.grad.is_sparse:
                    weight.grad = weight.grad.to_dense()
                weight.grad.sub_(_held(projector, weight.grad))


def _held(projector: Projector, movement: Tensor) -> Tensor:
    """The component of a movement within the memory, in the precision of the bases."""
    return to_dense(projector.project_onto(movement.to(projector.importance.dtype))).to(movement.dtype)
