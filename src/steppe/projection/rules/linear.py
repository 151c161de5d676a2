"""Linear layers."""

from __future__ import annotations

from torch import Tensor, nn

from steppe.projection.rules.registry import register_rule


@register_rule(nn.Linear)
def linear_inputs(layer: nn.Module, x: Tensor) -> Tensor:
    """The rule of linear layers: every dimension but the last counts samples."""
    return x.reshape(1, -1, x.shape[-1])
