"""Whether a model uses the values of a weight otherwise than by calling its layer, without a gradient.

A model may multiply by the norm of a weight, detached. Its gradient then lies in the span of the layer's inputs, and
yet old outputs change with the weight. To find out, all covered weights are changed orthogonally to the inputs that
their layers get in a forward: the model's output must stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steppe.fast.factored import to_dense
from steppe.network.module_state import preserve_buffers, swap_parameters
from steppe.projection.hooks import capture_inputs, disable_fused_attention
from steppe.projection.layers import Layout, ProjectedWeight
from steppe.projection.misread_weights import row_projector, span_projector
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, clone_nest

_ROUNDING = 1000  # rounding errors of the output that a difference may amount to


def find_weights_used_by_value(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Nest) -> list[str]:
    """Find the weights on whose values the output depends otherwise than through their layers' calls.

    A weight whose layer gets as many input vectors as they have elements cannot be tested: there is no orthogonal
    change. Nor can models whose output is different in each forward, or normalized weights, whose norm must change.

    Args:
        model: The model, in eval mode.
        weights: The covered weights, by parameter name.
        x: A few prepared inputs.

    Returns:
        The names of those weights.
    """
    probe = _Probe(model, x)
    with torch.no_grad(), disable_fused_attention(model), preserve_buffers(model):
        inputs = _inputs_of(model, weights, x)
        before = probe.output({})
        if before is None or not probe.stays(before, {}):
            return []
        found = {name: _orthogonal(weights[name], columns) for name, columns in inputs.items()}
        changes = {name: change for name, change in found.items() if change is not None}
        if not changes or probe.stays(before, changes):
            return []
        return [name for name, change in changes.items() if not probe.stays(before, {name: change})]


@dataclass(frozen=True)
class _Probe:
    """Runs a model with changed weights."""

    model: nn.Module
    x: Nest

    def output(self, changes: Mapping[str, Tensor]) -> Tensor | None:
        """All numbers of the output; None if they are integers."""
        parameters = {name: self.model.get_parameter(name) for name in changes}
        moved = {name: p.detach() + changes[name] for name, p in parameters.items()}
        with swap_parameters(parameters, moved):
            output = call_model(self.model, clone_nest(self.x))
        return output.detach().flatten() if output.is_floating_point() else None

    def stays(self, before: Tensor, changes: Mapping[str, Tensor]) -> bool:
        """Whether the output stays under these changes, but for rounding."""
        after = self.output(changes)
        if after is None or after.shape != before.shape:
            return False
        dtypes = [before.dtype, *(change.dtype for change in changes.values())]
        precision = max(torch.finfo(dtype).eps for dtype in dtypes)
        moved = float((after - before).double().norm())
        return moved <= max(_ROUNDING * precision, math.sqrt(precision) / 10) * float(before.double().norm())


def _inputs_of(model: nn.Module, weights: Mapping[str, ProjectedWeight], x: Nest) -> dict[str, Tensor | None]:
    """The input vectors of each weight in one forward; None where they leave no orthogonal change."""
    found: dict[str, list[Tensor] | None] = {name: [] for name, weight in weights.items() if weight.norm is None}

    def sink(weight: ProjectedWeight, layer: nn.Module, x: Tensor) -> None:
        seen = found.get(weight.name)
        if seen is None:
            return
        seen.append(weight.rule(layer, x).detach().clone())
        if weight.layout is not Layout.TABLE and sum(part.shape[1] for part in seen) >= seen[0].shape[2]:
            found[weight.name] = None  # the rest need not be kept

    with capture_inputs(weights, sink):
        call_model(model, clone_nest(x))
    return {name: _joined(weights[name], seen) for name, seen in found.items()}


def _joined(weight: ProjectedWeight, seen: Sequence[Tensor] | None) -> Tensor | None:
    if not seen:
        return None
    return torch.cat(list(seen), dim=0 if weight.layout is Layout.TABLE else 1)


def _orthogonal(weight: ProjectedWeight, columns: Tensor | None) -> Tensor | None:
    """A change of a weight, as large as the weight, orthogonal to input vectors; None if there are none to be."""
    if columns is None:
        return None
    parameter = weight.parameter.detach()
    if weight.layout is Layout.TABLE:
        padding = getattr(weight.layers[0], "padding_idx", None)
        projector = row_projector(columns, parameter, padding)
    else:
        projector = span_projector(weight.layout, columns, parameter)
    generator = torch.Generator().manual_seed(0)
    step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu").to(parameter.device)
    step *= float(parameter.double().square().mean().sqrt()) or 1.0
    return to_dense(projector.project_out(step)).to(parameter.dtype)
