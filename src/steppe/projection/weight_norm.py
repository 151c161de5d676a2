"""Weights with weight normalization, W = g v / ‖v‖, in torch's new form (parametrizations) and its old one (hooks).

A change of v orthogonal to a layer's inputs changes ‖v‖, and so all outputs. So it is not enough to project the
gradient of v: the change that a step makes of W is projected, and g and v are set to what gives that W. This is always
possible, since every W is ‖W‖ · W / ‖W‖.

Other parametrizations have no such inverse. Spectral normalization divides by the largest singular value, so the
projected W would be divided again, and a change in any direction may change all outputs. They are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm as WeightNormHook

from steppe.fast.factored import FactoredGrad, to_dense


class _Projector(Protocol):
    """What projects a change of W."""

    def project_out(self, gradient: Tensor, /) -> Tensor | FactoredGrad: ...


@dataclass(frozen=True)
class WeightNorm:
    """How a layer computes one of its weights from a direction v and a scale g."""

    weight: str
    """The name of W within the layer."""
    direction: str
    """The name of v within the layer."""
    scale: str
    """The name of g within the layer."""
    dim: int
    """The dimension that the norm leaves; -1 for the norm of the whole weight."""

    def compute(self, v: Tensor, g: Tensor) -> Tensor:
        """W = g v / ‖v‖."""
        return v * (g / self.norm(v))

    def norm(self, v: Tensor) -> Tensor:
        """‖v‖, in the shape of g."""
        return torch.norm_except_dim(v, 2, self.dim)

    def limit(
        self, parameters: tuple[Tensor, Tensor], moved: tuple[Tensor, Tensor], projector: _Projector
    ) -> tuple[Tensor, Tensor]:
        """Project the change of W that a step makes.

        Args:
            parameters: v and g before the step.
            moved: v and g after the step.
            projector: The projector of W.

        Returns:
            v and g that give W plus the projected change. The length of v is that after the step.
        """
        before, after = self.compute(*parameters), self.compute(*moved)
        weight = before + to_dense(projector.project_out(after - before))
        length = self.norm(weight)
        sign = torch.where(moved[1] < 0, -1.0, 1.0).to(length.dtype)
        v = torch.where(length > 0, weight * (sign * self.norm(moved[0]) / length), moved[0])
        return v, sign * length


def find_weight_norms(layer: nn.Module) -> Iterator[WeightNorm]:
    """Find the weights of a layer that are normalized, and nothing else.

    Args:
        layer: The layer.

    Yields:
        How each of them is computed.
    """
    if parametrize.is_parametrized(layer):
        parametrizations = layer.parametrizations
        assert isinstance(parametrizations, nn.ModuleDict)
        for name, used in parametrizations.items():
            first = used[0]  # type: ignore[index]
            if len(used) == 1 and type(first).__qualname__ == "_WeightNorm":  # type: ignore[arg-type]
                path = f"parametrizations.{name}.original"
                yield WeightNorm(name, f"{path}1", f"{path}0", first.dim)
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNormHook):
            yield WeightNorm(hook.name, f"{hook.name}_v", f"{hook.name}_g", hook.dim)
