"""Whether what a layer gives depends on its weight W only through W X, with X the input vectors that its rule finds.

A gradient memory protects W X: it lets W move by some Δ with Δ X = 0 alone. If a layer computes with anything else than
X (sin(3x), say), or with anything else than W (its rows at unit length), that leaves its output free to move. So such a
Δ is added, as large as W, and what the layer gives is compared with what it gave before. That is done in eval mode, in
which outputs are to be kept; which way the gradient points in training does not matter, for whatever lies along X is
taken out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from steppe.network.module_state import swap_parameters
from steppe.projection.hooks import capture_inputs, disable_fused_attention
from steppe.projection.layers import RULES, ProjectedWeight
from steppe.runtime.hooks import temporary_hooks

_VECTORS = 8  # input vectors at the most that a call is tried with
_ROUNDING = 64  # roundings of the largest number that an output may be off by
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def find_misread_weights(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Tensor) -> list[str]:
    """The weights that some layer uses otherwise than by multiplying the vectors found in its input, or may: it cannot
    be tried, or was not called. Seen with prepared inputs. Layers that run torch's own forward are not tried.
    """
    doubtful = {
        name: layers for name, weight in weights.items() if (layers := [m for m in weight.layers if not _is_known(m)])
    }
    calls: dict[nn.Module, list[_Arguments]] = {layer: [] for layers in doubtful.values() for layer in layers}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[layer].append(_clone_arguments((args, kwargs)))  # the model may go on in place

    with temporary_hooks() as hooks:
        for layer in calls:  # before hooks of the user's own, which will see the same when the call is made again
            hooks.append(layer.register_forward_pre_hook(note, prepend=True, with_kwargs=True))
        if calls:
            with torch.no_grad(), disable_fused_attention(model):
                model(x)
    return [
        name
        for name, layers in doubtful.items()
        if not all(
            calls[layer] and all(_multiplies_inputs(weights[name], layer, c) for c in calls[layer]) for layer in layers
        )
    ]


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _clone_arguments(argument: Any) -> Any:
    """The same with tensors of its own, also within tuples, lists and dictionaries."""
    if isinstance(argument, Tensor):
        return argument.detach().clone()
    if type(argument) in (tuple, list):
        return type(argument)(_clone_arguments(part) for part in argument)
    if type(argument) is dict:
        return {key: _clone_arguments(part) for key, part in argument.items()}
    return argument


def _is_known(layer: nn.Module) -> bool:
    """Whether calling it runs torch's own forward of a layer with a rule, and nobody's hooks."""
    kind = next((kind for kind in RULES if isinstance(layer, kind)), None)
    return (
        kind is not None
        and kind.__module__.startswith("torch.nn.")
        and all(getattr(type(layer), name, None) is getattr(kind, name, None) for name in _METHODS)
        and not any(name in vars(layer) for name in _METHODS)
        and not any(getattr(layer, hooks) for hooks in _HOOKS)
        and layer.weight is layer._parameters["weight"]
    )


_METHODS = ("forward", "_conv_forward", "__call__")


def _multiplies_inputs(weight: ProjectedWeight, layer: nn.Module, arguments: _Arguments) -> bool:
    """Whether the layer's output stays where it is, on some or all of the input vectors, when its weight moves by Δ
    with Δ X = 0 for these; and not because it does not depend on its weight at all.
    """
    parameter = layer._parameters["weight"]
    assert parameter is not None
    columns: list[Tensor] = []

    def call() -> Tensor | None:
        args, kwargs = _clone_arguments(arguments)
        output = layer(*args, **kwargs)
        return output.detach().clone() if isinstance(output, Tensor) and output.is_floating_point() else None

    def sink(weight: ProjectedWeight, layer: nn.Module, x: Tensor) -> None:
        columns.append(weight.rule(layer, x).clone())

    def moved(step: Tensor) -> Tensor | None:
        with swap_parameters({"weight": parameter}, {"weight": parameter.detach() + step}):
            return call()

    try:
        with torch.no_grad():
            with capture_inputs({weight.name: replace(weight, layers=(layer,))}, sink):
                before = call()
            if before is None or len(columns) != 1:
                return False
            return any(
                _output_stays(before, moved, parameter, *part) for part in _probe_sets(columns[0], before, layer)
            )
    except Exception:  # whatever it is called with, or gives, it is not what a rule is made for
        return False


_Read = Callable[[Tensor], Tensor]


def _probe_sets(columns: Tensor, output: Tensor, layer: nn.Module) -> Iterator[tuple[Tensor, _Read]]:
    """Sets of input vectors, (groups, n, in), each with what takes from an output all that belongs to them.

    First a few vectors with their own outputs, where each seems to have one: few enough to leave Δ room. Then all of
    them with the whole output, for layers that mix them afterwards.
    """
    _, count, size = columns.shape
    lengths = torch.linalg.vector_norm(columns, dim=(0, 2))
    chosen = lengths.argsort(descending=True)[: min(_VECTORS, max(size // 2, 1))]

    def read(axis: int) -> _Read:
        return lambda output: output.movedim(axis, -1).flatten(0, -2)[chosen]

    for axis in _channel_axes(layer, output):
        if output.numel() == count * output.shape[axis]:
            yield columns[:, chosen], read(axis)
    yield columns, lambda output: output


def _channel_axes(layer: nn.Module, output: Tensor) -> list[int]:
    """The dimensions of an output that may be the one of the weight's rows."""
    if isinstance(layer, nn.Linear):
        return [-1]
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return [output.ndim - 1 - len(layer.kernel_size)]
    return [-1, 1] if output.ndim > 1 else []


def _output_stays(
    before: Tensor, moved: Callable[[Tensor], Tensor | None], weight: Tensor, columns: Tensor, read: _Read
) -> bool:
    """Whether a step of the weight across these columns leaves their outputs alone, where one along them does not."""
    generator = torch.Generator().manual_seed(0)
    size = float(weight.detach().double().square().mean().sqrt()) or 1.0
    step = size * torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.device)
    rows = step.reshape(columns.shape[0], -1, columns.shape[2])
    basis, values, _ = torch.linalg.svd(columns.double().mT, full_matrices=False)
    basis = basis * (values > 1e-9 * values[:, :1]).unsqueeze(1)
    along = (rows @ basis) @ basis.mT
    across = rows - along
    if float(across.norm()) <= 1e-6 * float(rows.norm()):  # the columns leave it nowhere to go
        return False
    here = read(before)
    outputs = [moved(part.reshape(weight.shape).to(weight.dtype)) for part in (across, along)]
    if any(output is None or output.shape != before.shape for output in outputs):
        return False
    left, right = (float((read(output) - here).double().norm()) for output in outputs if output is not None)
    precision = torch.finfo(before.dtype).eps
    noise = _ROUNDING * precision * float(here.double().norm())
    return left <= math.sqrt(precision) * right + noise < right
