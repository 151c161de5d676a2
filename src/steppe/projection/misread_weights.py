"""Whether a layer's output depends on its weight W only through W X, with X the input vectors that its rule finds.

A gradient memory protects W X: it allows only changes Δ of W with Δ X = 0. If a layer multiplies something other than X
(such as sin(3x)), or by something other than W (such as its normalized rows), its output may still change. To find out,
add such a Δ, as large as W, and compare the outputs. This is done in eval mode, since that is the output to preserve;
the gradient in training mode does not matter, as its component along X is removed in any case.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm as WeightNormHook

from steppe.fast.factored import to_dense
from steppe.network.module_state import swap_parameters
from steppe.projection.hooks import capture_inputs, disable_fused_attention
from steppe.projection.layers import RULES, Layout, ProjectedWeight
from steppe.projection.layouts import make_projector
from steppe.projection.projector import SoftProjector
from steppe.runtime.hooks import temporary_hooks
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, leaves, map_nest

_VECTORS = 8  # the maximum number of input vectors to test a call with
_ROUNDING = 64  # rounding errors of the largest output that a difference may amount to
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def find_misread_weights(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Nest) -> list[str]:
    """Find the weights that some layer uses other than by multiplying the input vectors that its rule finds.

    Layers that run torch's own forward are trusted. Layers that cannot be tested, or are not called, are not.

    Args:
        model: The model.
        weights: The covered weights, by parameter name.
        x: Prepared inputs.

    Returns:
        The names of the weights that cannot be covered.
    """
    users: dict[nn.Module, list[str]] = {}
    for weight in weights.values():
        for layer, name in weight.uses:
            users.setdefault(layer, []).append(name)
    calls: dict[nn.Module, list[_Arguments]] = {
        layer: [] for layer, names in users.items() if not _is_known(layer, names)
    }

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[layer].append(_clone_arguments((args, kwargs)))  # the model may modify it in place

    with temporary_hooks() as hooks:
        for layer in calls:  # before the user's own hooks, which will see the same when the call is repeated
            hooks.append(layer.register_forward_pre_hook(note, prepend=True, with_kwargs=True))
        if calls:
            with torch.no_grad(), disable_fused_attention(model):
                call_model(model, x)
    return [
        name
        for name, weight in weights.items()
        if not all(
            calls[layer] and all(_multiplies_inputs(weight, layer, own, call) for call in calls[layer])
            for layer, own in weight.uses
            if layer in calls
        )
    ]


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _clone_arguments(arguments: _Arguments) -> _Arguments:
    """A copy with cloned tensors."""
    copies: _Arguments = map_nest(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, arguments)
    return copies


def _is_known(layer: nn.Module, names: Iterable[str]) -> bool:
    """Whether a call runs torch's own forward of a layer with a rule, without hooks, on these of its weights."""
    kind = next((kind for kind in type(layer).__mro__ if kind in RULES), None)
    return (
        kind is not None
        and kind.__module__.startswith("torch.nn.")
        and all(getattr(type(layer), name, None) is getattr(kind, name, None) for name in _METHODS)
        and not any(name in vars(layer) for name in _METHODS)
        and not any(not isinstance(hook, WeightNormHook) for hooks in _HOOKS for hook in getattr(layer, hooks).values())
        and all(operator.attrgetter(name)(layer) is layer.get_parameter(name) for name in names)
    )


_METHODS = ("forward", "_conv_forward", "__call__")


def _multiplies_inputs(weight: ProjectedWeight, layer: nn.Module, name: str, arguments: _Arguments) -> bool:
    """Whether the layer's output depends on its weight, but not on changes Δ of it with Δ X = 0."""
    parameter = layer.get_parameter(name)
    columns: list[Tensor] = []

    def call() -> Tensor | None:
        args, kwargs = _clone_arguments(arguments)
        return _as_tensor(layer(*args, **kwargs))

    def sink(weight: ProjectedWeight, layer: nn.Module, x: Tensor) -> None:
        columns.append(weight.rule(layer, x).clone())

    def moved(step: Tensor) -> Tensor | None:
        with swap_parameters({"weight": parameter}, {"weight": parameter.detach() + step}):
            return call()

    try:
        with torch.no_grad():
            with capture_inputs({weight.name: replace(weight, layers=(layer,), names=(name,))}, sink):
                before = call()
            if before is None or len(columns) != 1:
                return False
            if weight.layout is Layout.TABLE:
                projector = row_projector(columns[0], parameter, getattr(layer, "padding_idx", None))
                return _output_stays(before, moved, parameter, projector, lambda output: output)
            return any(
                _output_stays(before, moved, parameter, span_projector(weight.layout, part, parameter), read)
                for part, read in _probe_sets(columns[0], before, layer)
            )
    except Exception:  # it takes or returns something that rules do not support
        return False


def _as_tensor(output: Any) -> Tensor | None:
    """A copy of what a layer returns: a tensor, or the numbers of all tensors in a nest; None if there are none."""
    if isinstance(output, Tensor):
        return output.detach().clone() if output.is_floating_point() else None
    parts = [x.detach().flatten() for x in leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.cat(parts) if parts else None


_Read = Callable[[Tensor], Tensor]


def _probe_sets(columns: Tensor, output: Tensor, layer: nn.Module) -> Iterator[tuple[Tensor, _Read]]:
    """Sets of input vectors to test, (groups, n, in), each with a function that selects their part of an output.

    Args:
        columns: All input vectors of a call.
        output: The output of the call.
        layer: The layer.

    Yields:
        If each vector seems to have its own output, a few vectors, so few that a Δ exists; then all vectors with the
        whole output, for layers that mix them afterwards.
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
    """The dimensions of an output that may correspond to the rows of the weight."""
    if isinstance(layer, nn.Linear):
        return [-1]
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return [output.ndim - 1 - len(layer.kernel_size)]
    return [-1, 1] if output.ndim > 1 else []


def row_projector(rows: Tensor, weight: Tensor, padding: int | None) -> SoftProjector:
    """The projector onto rows of a table, and the one for padding, which is never trained."""
    held = torch.unique(rows if padding is None else torch.cat([rows, rows.new_tensor([padding])]))
    return make_projector(Layout.TABLE, weight, held, torch.ones(1, len(held), dtype=torch.float64, device=held.device))


def span_projector(layout: Layout, columns: Tensor, weight: Tensor) -> SoftProjector:
    """The projector onto the span of input vectors, (groups, n, in)."""
    basis, values, _ = torch.linalg.svd(columns.double().mT, full_matrices=False)
    basis = basis * (values > 1e-9 * values[:, :1]).unsqueeze(1)
    return make_projector(layout, weight, basis, torch.ones_like(values))


def _output_stays(
    before: Tensor, moved: Callable[[Tensor], Tensor | None], weight: Tensor, projector: SoftProjector, read: _Read
) -> bool:
    """Whether a step of the weight outside its inputs' span preserves their outputs, but one within does not."""
    generator = torch.Generator().manual_seed(0)
    size = float(weight.detach().double().square().mean().sqrt()) or 1.0
    step = size * torch.randn(weight.shape, generator=generator, dtype=torch.float64, device="cpu").to(weight.device)
    along = to_dense(projector.project_onto(step))
    across = step - along
    if float(across.norm()) <= 1e-6 * float(step.norm()):  # the inputs span the whole space
        return False
    here = read(before)
    outputs = [moved(part.to(weight.dtype)) for part in (across, along)]
    if any(output is None or output.shape != before.shape for output in outputs):
        return False
    left, right = (float((read(output) - here).double().norm()) for output in outputs if output is not None)
    precision = torch.finfo(before.dtype).eps
    noise = _ROUNDING * precision * float(here.double().norm())
    return left <= math.sqrt(precision) * right + noise < right
