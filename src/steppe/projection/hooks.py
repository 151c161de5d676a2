"""Collect layer inputs during a forward: hooks that live for the length of a `with` block and not a line longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from steppe.projection.head_detection import is_output_head
from steppe.projection.layers import ProjectedWeight
from steppe.runtime.hooks import temporary_hooks

_HALF = (torch.float16, torch.bfloat16)
CallSink = Callable[[ProjectedWeight, nn.Module, Tensor], None]


class _PassThroughMode(TorchFunctionMode):
    """Sees every function of torch that this thread calls, and lets it be."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def disable_fused_attention(model: nn.Module) -> Iterator[None]:
    """Inside, torch's attention does not go its quick way of eval mode, on which padding is left out and layers are
    handed tensors that have no shape.

    It is not taken where a function mode looks on, which is this thread's own affair; torch.backends.mha is not.
    """
    attends = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    with _PassThroughMode() if attends else nullcontext():
        yield


@contextmanager
def capture_inputs(weights: Mapping[str, ProjectedWeight], sink: CallSink) -> Iterator[None]:
    """Inside, every forward hands each call of a covered layer, the input as it is, to `sink(weight, layer, x)`."""

    def hook_for(weight: ProjectedWeight) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = (args[0] if args else kwargs["input"]).detach()
            with torch.autocast(x.device.type, enabled=False):  # whatever the model's precision, not that of the bases
                sink(weight, layer, x.float() if x.dtype in _HALF else x)

        return hook

    with temporary_hooks() as hooks:
        for weight in weights.values():
            for layer in dict.fromkeys(weight.layers):
                hooks.append(layer.register_forward_pre_hook(hook_for(weight), with_kwargs=True))
        yield


def find_head_weight(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Tensor) -> str | None:
    """The covered weight whose layer gives the model's output, found by one forward; None if there is no such one.

    A layer that returns the very tensor the model returns is it; otherwise one from whose output alone the model's
    comes, row by row (a scale may follow it).
    """
    calls, result = _record_outputs(model, weights, x)
    for name, output, version in calls:
        if output is result and output._version == version:  # else something may have been added to it
            return name
    for name in dict.fromkeys(name for name, output, _ in reversed(calls) if output.numel() == result.numel()):
        others = [layer for other, weight in weights.items() if other != name for layer in weight.layers]
        if is_output_head(model, weights[name].layers, others, x):
            return name
    return None


def find_last_weight(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Tensor) -> str | None:
    """The weight of the layer that a forward runs last; None where no call of a layer is seen."""
    calls, _ = _record_outputs(model, weights, x)
    return calls[-1][0] if calls else None


def find_weights_used_outside(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Tensor) -> list[str]:
    """The covered weights that a forward also uses where none of their layers is called, so that a part of the gradient
    is owed to no layer's input.

    While a layer is called its weight counts as a constant: a gradient that still comes has come from elsewhere.
    """
    own = dict(model.named_parameters())
    wanted = {name: own[name] for name in weights}

    def hook_for(weight: nn.Parameter, wants: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            weight.requires_grad_(wants)

        return hook

    try:
        with temporary_hooks() as hooks, torch.enable_grad():
            for name, weight in weights.items():
                for layer in dict.fromkeys(weight.layers):
                    hooks.append(layer.register_forward_pre_hook(hook_for(wanted[name], False), prepend=True))
                    hooks.append(layer.register_forward_hook(hook_for(wanted[name], True)))
            output: Tensor = model(x.clone())  # it may work in place
            if not (wanted and output.requires_grad):
                return []
            found = torch.autograd.grad(output.logsumexp(-1).sum(), list(wanted.values()), allow_unused=True)
    finally:
        for parameter in wanted.values():
            parameter.requires_grad_()
    return [name for name, g in zip(wanted, found, strict=True) if g is not None and bool(g.any())]


def _record_outputs(
    model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Tensor
) -> tuple[list[tuple[str, Tensor, int]], Tensor]:
    """What each call of the layers gives, under the name of its weight and with its version, and what the model
    gives.
    """
    calls: list[tuple[str, Tensor, int]] = []

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if isinstance(output, Tensor):  # a layer with a forward of its own may give anything
                calls.append((name, output, output._version))

        return hook

    with temporary_hooks() as hooks, torch.no_grad():
        for name, weight in weights.items():
            for layer in dict.fromkeys(weight.layers):
                hooks.append(layer.register_forward_hook(hook_for(name)))
        return calls, model(x.clone())  # it may work in place
