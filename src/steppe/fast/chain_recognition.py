"""Recognize models that are chains of linear layers, from their source code alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from steppe.fast.linear_chain import Activation, LinearChain, Link, has_global_hooks, overrides_call
from steppe.fast.read_forward import find_function, straight_line
from steppe.fast.switch import fast_paths_enabled

_ATEN = torch.ops.aten
_threshold_backward: Callable[[Tensor, Tensor, int], Tensor] = _ATEN.threshold_backward.default
_RELU = Activation(torch.relu, torch.relu_, lambda slope, output: _threshold_backward(slope, output, 0))
_TANH = Activation(torch.tanh, torch.tanh_, _ATEN.tanh_backward.default)
_SIGMOID = Activation(torch.sigmoid, torch.sigmoid_, _ATEN.sigmoid_backward.default)
_BY_MODULE: dict[type[nn.Module], Activation] = {nn.ReLU: _RELU, nn.Tanh: _TANH, nn.Sigmoid: _SIGMOID}
_BY_FUNCTION: dict[object, Activation] = {
    **dict.fromkeys((torch.relu, torch.relu_, functional.relu, "relu", "relu_"), _RELU),
    **dict.fromkeys((torch.tanh, functional.tanh, "tanh"), _TANH),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid, "sigmoid"), _SIGMOID),
}

_Step = tuple[str, object]
"""What is called: a layer with its path, or a function or a method's name with an empty path."""


def find_linear_chain(model: nn.Module) -> LinearChain | None:
    """Find the chain that a model is.

    The model's forward must be a straight line of calls of its layers and of the functions above: no branches, helper
    functions or attributes that might change. The model must have no buffers and no hooks, and use every weight once.
    The model is not run, and nothing is changed in it or in the process.

    Args:
        model: Any model.

    Returns:
        The chain; None if the model does anything else, or could, or if fast paths are disabled.

    Example:
        >>> chain = find_linear_chain(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> [link.weight for link in chain.links]
        ['0.weight', '2.weight']
        >>> find_linear_chain(nn.Conv2d(3, 8, 3)) is None
        True
    """
    if not fast_paths_enabled():
        return None
    modules = dict(model.named_modules())
    linear = {id(p) for module in modules.values() if type(module) is nn.Linear for p in module.parameters()}
    if {id(p) for p in model.parameters()} != linear or any(True for _ in model.buffers()):
        return None
    if any(overrides_call(module) for module in modules.values()) or has_global_hooks():
        return None
    steps = list(_steps_of_sequential(model)) if type(model) is nn.Sequential else _steps_of_forward(model)
    if steps is None:
        return None
    links: list[Link] = []
    flattens = False
    for path, step in steps:
        if _is_flatten(step) and not links:
            flattens = True
        elif not _append_step(path, step, links):
            return None
    used = [id(p) for link in links for p in link.layer.parameters()]
    if not links or len(set(used)) != len(used) or set(used) != linear:
        return None
    return LinearChain(links, list(modules.values()), flattens)


def _steps_of_sequential(sequential: nn.Module, path: str = "") -> Iterator[_Step]:
    """The layers of a sequence and of the sequences in it, in order."""
    for name, part in sequential._modules.items():
        if type(part) is nn.Sequential:
            yield from _steps_of_sequential(part, f"{path}{name}.")
        else:
            yield f"{path}{name}", part


def _steps_of_forward(model: nn.Module) -> list[_Step] | None:
    """What the forward of a custom class calls, in order; None if its source does not show that."""
    kind = type(model)
    plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    calls = straight_line(kind.forward)
    if calls is None or not plain or kind.__module__.startswith("torch.nn"):
        return None
    steps: list[_Step] = []
    for call in calls:
        if call.kind == "layer":
            layer = model._modules.get(call.name)
            if layer is None or getattr(model, call.name) is not layer:  # not a layer, or hidden by another attribute
                return None
            steps.append((call.name, layer))
        else:
            is_path = call.kind == "function"
            steps.append(("", find_function(call.name, kind.forward.__globals__) if is_path else call.name))
    return steps


def _is_flatten(step: object) -> bool:
    return type(step) is nn.Flatten and (step.start_dim, step.end_dim) == (1, -1)


def _append_step(path: str, step: object, links: list[Link]) -> bool:
    """Append a step to the chain; False if it does not fit."""
    if type(step) is nn.Linear:
        links.append(Link(step, f"{path}.weight", f"{path}.bias"))
        return True
    if type(step) is nn.Identity:
        return True
    if isinstance(step, nn.Module):
        activation = _BY_MODULE.get(type(step))
    else:
        activation = _BY_FUNCTION.get(step) if isinstance(step, Hashable) else None
    if activation is None or not links or links[-1].activation is not None:
        return False
    links[-1] = links[-1]._replace(activation=activation)
    return True
