"""Observe the layers of a model during a forward, with hooks that are always removed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from steppe.network.network import Network
from steppe.projection.head_detection import is_output_head
from steppe.projection.layers import CallRule, Layout, ProjectedWeight
from steppe.runtime.hooks import temporary_hooks
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, clone_nest, map_nest

_HALF = (torch.float16, torch.bfloat16)
CallSink = Callable[[ProjectedWeight, nn.Module, Tensor], None]
"""Takes a weight, a layer that uses it, and what the weight's rule turns into input vectors: the layer's first
argument, or what the weight's call rule computes from all arguments."""


class _PassThroughMode(TorchFunctionMode):
    """A function mode that changes nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def disable_fused_attention(model: nn.Module) -> Iterator[None]:
    """Inside, torch's attention does not take its fused path in eval mode, which hands layers nested tensors.

    torch avoids that path under a function mode. A mode is local to this thread; `torch.backends.mha` is not.

    Args:
        model: The model; nothing happens if it has no attention.

    Yields:
        Nothing.
    """
    attends = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    with _PassThroughMode() if attends else nullcontext():
        yield


@contextmanager
def capture_inputs(weights: Mapping[str, ProjectedWeight], sink: CallSink) -> Iterator[None]:
    """Inside, pass what the weights of a covered layer multiply to `sink(weight, layer, x)` at every call.

    Args:
        weights: The covered weights, by parameter name.
        sink: Called with each weight, layer and input.

    Yields:
        Nothing.

    Example:
        >>> import torch
        >>> from steppe.projection.hooks import capture_inputs
        >>> from steppe.projection.layers import projected_weights
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> with capture_inputs(projected_weights(model), lambda weight, layer, x: print(weight.name, *x.shape)):
        ...     _ = model(torch.randn(5, 4))
        0.weight 5 4
        1.weight 5 3
    """
    users: dict[nn.Module, list[tuple[ProjectedWeight, str]]] = {}
    for weight in weights.values():
        for layer, name in weight.uses:
            users.setdefault(layer, []).append((weight, name))

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for rule, used in _by_call_rule(users[layer]).items():
            first = used[0][0].parameter
            with torch.autocast(first.device.type, enabled=False), torch.no_grad():  # the bases keep full precision
                if rule is None:
                    x = _widened((args[0] if args else kwargs["input"]).detach(), torch.float32)
                    seen = {weight.name_in_calls(name): x for weight, name in used}
                else:
                    seen = dict(rule(layer, *_widened((args, kwargs), first.dtype)))
                for weight, name in used:
                    sink(weight, layer, seen[weight.name_in_calls(name)])

    with temporary_hooks() as hooks:
        for layer in users:
            hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _by_call_rule(
    users: list[tuple[ProjectedWeight, str]],
) -> dict[CallRule | None, list[tuple[ProjectedWeight, str]]]:
    """Weights and their names in a layer, by their call rule."""
    groups: dict[CallRule | None, list[tuple[ProjectedWeight, str]]] = {}
    for weight, name in users:
        groups.setdefault(weight.call_rule, []).append((weight, name))
    return groups


def _widened(nest: Any, dtype: torch.dtype) -> Any:
    """A nest with its half-precision tensors in another precision."""
    return map_nest(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.dtype in _HALF else x, nest)


def find_head_weight(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Nest) -> str | None:
    """Find the head: the layer that returns the model's output, or from whose output alone it is computed element-wise.

    Args:
        model: The model.
        weights: The weights whose layers may be the head.
        x: Prepared inputs.

    Returns:
        The name of the head's weight, or None if no layer is the head.
    """
    calls, result = _record_outputs(model, weights, x)
    for name, output, version in calls:
        if output is result and output._version == version:  # else it was modified in place afterwards
            return name
    for name in dict.fromkeys(name for name, output, _ in reversed(calls) if output.numel() == result.numel()):
        others = [layer for other, weight in weights.items() if other != name for layer in weight.layers]
        if is_output_head(model, weights[name].layers, others, x):
            return name
    return None


def find_last_weight(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Nest) -> str | None:
    """Find the weight of the layer that a forward calls last; None if it calls none."""
    calls, _ = _record_outputs(model, weights, x)
    return calls[-1][0] if calls else None


def find_data_weights(network: Network, weights: Mapping[str, ProjectedWeight], x: Nest) -> list[str]:
    """Find the covered weights whose layers' inputs are the data: they do not depend on any trainable weight.

    Tables, and layers that compute their weights' inputs themselves (recurrent ones, attention), do not count.

    Args:
        network: The network.
        weights: The covered weights, by parameter name.
        x: Stored samples to run it on.

    Returns:
        Their names.
    """
    plain = {name: w for name, w in weights.items() if w.call_rule is None and w.layout is Layout.ROWS}
    depends: dict[str, bool] = {}

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs: Tensor = args[0] if args else kwargs["input"]
            depends[name] = depends.get(name, False) or inputs.requires_grad

        return hook

    with temporary_hooks() as hooks, network.mode(training=False), torch.inference_mode(False), torch.enable_grad():
        for name, weight in plain.items():
            for layer in dict.fromkeys(weight.layers):
                hooks.append(layer.register_forward_pre_hook(hook_for(name), with_kwargs=True))
        network.input_copies.call(network.prepare_inputs(x))
    return [name for name in plain if depends.get(name) is False]


def find_weights_used_outside(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Nest) -> list[str]:
    """Find the covered weights that a forward also uses outside their layers.

    During a layer's calls, its weight does not require a gradient: any gradient it still gets comes from elsewhere.

    Args:
        model: The model.
        weights: The covered weights, by parameter name.
        x: Prepared inputs.

    Returns:
        The names of the weights used outside their layers.
    """
    own = dict(model.named_parameters())
    parameters = {name: own[name] for name in weights}

    def hook_for(weight: nn.Parameter, required: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            weight.requires_grad_(required)

        return hook

    try:
        with temporary_hooks() as hooks, torch.enable_grad():
            for name, weight in weights.items():
                for layer in dict.fromkeys(weight.layers):
                    hooks.append(layer.register_forward_pre_hook(hook_for(parameters[name], False), prepend=True))
                    hooks.append(layer.register_forward_hook(hook_for(parameters[name], True)))
            output: Tensor = call_model(model, clone_nest(x))  # the model may modify it in place
            if not (parameters and output.requires_grad):
                return []
            total = output.logsumexp(-1).sum()
            gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    finally:
        for parameter in parameters.values():
            parameter.requires_grad_()
    return [name for name, g in zip(parameters, gradients, strict=True) if g is not None and bool(g.any())]


def _record_outputs(
    model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Nest
) -> tuple[list[tuple[str, Tensor, int]], Tensor]:
    """The output of each call of the layers, with the name of its weight and its version, and the model's output."""
    calls: list[tuple[str, Tensor, int]] = []

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if isinstance(output, Tensor):  # a custom layer may return anything
                calls.append((name, output, output._version))

        return hook

    with temporary_hooks() as hooks, torch.no_grad():
        for name, weight in weights.items():
            for layer in dict.fromkeys(weight.layers):
                hooks.append(layer.register_forward_hook(hook_for(name)))
        return calls, call_model(model, clone_nest(x))  # the model may modify it in place
