"""Collect the inputs of a model's covered layers, from which bases are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from steppe.errors import LayerDivergedError
from steppe.projection.basis import Representation, Spectrum
from steppe.projection.extend_basis import ExtendedBasis, extend_basis
from steppe.projection.hooks import capture_inputs, disable_fused_attention
from steppe.projection.layers import Layout, ProjectedWeight
from steppe.projection.row_counts import RowCounts
from steppe.runtime.session import yield_point

Collected = Representation | RowCounts
"""The inputs of a weight's layers."""


def collect_inputs(
    model: nn.Module,
    covered: Mapping[str, ProjectedWeight],
    thresholds: Mapping[str, float],
    forwards: Iterable[object],
) -> dict[str, Collected]:
    """Collect the inputs of the covered layers while the model runs.

    Args:
        model: The model, in eval mode.
        covered: The covered weights, by parameter name.
        thresholds: The share of the inputs' energy that each weight's basis will hold (ε).
        forwards: Runs the model once each time it is advanced.

    Returns:
        The inputs of each covered weight's layers, by parameter name.

    Raises:
        LayerDivergedError: If a layer's inputs are not finite.
    """
    representations = {name: _empty(weight, thresholds[name]) for name, weight in covered.items()}
    with (
        torch.no_grad(),
        disable_fused_attention(model),
        capture_inputs(covered, lambda weight, layer, x: representations[weight.name].add_call(weight, layer, x)),
    ):
        for _ in forwards:
            yield_point()
    for name, representation in representations.items():
        if not representation.is_finite():  # the last update diverged, and no loss was computed since
            raise LayerDivergedError(
                f"the inputs of the layer with the weight {name!r} are not finite, or too large to be squared: "
                "lower the step size (lr, ascent_lr) or check the data."
            )
    return representations


def _empty(weight: ProjectedWeight, threshold: float) -> Collected:
    """What to collect the inputs of a weight in."""
    return RowCounts(len(weight.parameter)) if weight.layout is Layout.TABLE else Representation(threshold)


def select_directions(representation: Collected, threshold: float | None) -> Spectrum | None:
    """The directions to hold, all of them without a threshold; None if nothing was collected."""
    if threshold is None and isinstance(representation, Representation):
        return representation.spectrum()
    return representation.leading(1.0 if threshold is None else threshold)


def extend_directions(
    representation: Collected, old: Tensor | None, threshold: float, *, first: bool
) -> ExtendedBasis | None:
    """The extended basis; None if nothing was collected."""
    if isinstance(representation, RowCounts):
        return representation.extend(old, threshold, first=first)
    return extend_basis(representation, old, threshold, first=first)
