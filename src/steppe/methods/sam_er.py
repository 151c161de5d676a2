"""SAM-ER: experience replay with sharpness-aware minimization (Foret et al., 2021).

With D the batch and N a sample of the replay buffer, one update is

    g = ∇L_{D∪N}(w);   v = ρ g / ‖g‖
    w ← w − lr · ∇L_{D∪N}(w + v)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.fast.factored import Gradient, ParamDict, to_dense
from steppe.methods.base import Method
from steppe.methods.parts.replay_method import ReplayConfig, ReplayMethod
from steppe.methods.parts.sgd import clip_by_norm
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class SAMER(ReplayConfig):
    """Settings of SAM-ER."""

    clip: float = setting(2.0, "maximum norm of the gradient at w + v; 0 disables clipping", at_least=0)
    rho: float = setting(0.05, "length of the perturbation v (ρ)", above=0)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        return _SAMER(self, network, streams)


class _SAMER(ReplayMethod[SAMER]):
    def observe(self, batch: Batch) -> Tensor:
        union = self.network.prepare(batch.joined(self.replay.sample(len(batch))))  # D ∪ N
        _, g = self.network.loss_and_grad(union, statistics=False)
        v = scale_to_norm(g, self.settings.rho)
        loss, gradient = self.network.loss_and_grad(union, at=self.network.scratch.perturbed(v), as_factors=True)
        self.descent.step(clip_by_norm(gradient, self.settings.clip))
        return loss


def scale_to_norm(gradient: Gradient, length: float) -> ParamDict:
    """Scale a gradient to a given norm over all parameters together.

    Args:
        gradient: The gradient by parameter name.
        length: The norm of the result.

    Returns:
        The scaled gradient; zeros if the gradient is zero.
    """
    dense = {name: to_dense(g) for name, g in gradient.items()}
    norm = torch.stack([torch.linalg.vector_norm(g) for g in dense.values()]).norm()
    return {name: g * (length / (norm + 1e-12)) for name, g in dense.items()}


_PRESETS = {
    "pmnist": {"lr": 0.005, "buffer": 200},
    "pmnist-60k": {"lr": 0.005, "buffer": 1000},
    "cifar100-split": {"lr": 0.03, "buffer": 1000},
    "cifar100-superclass": {"lr": 0.01, "buffer": 1000},
    "tiny-imagenet": {"lr": 0.01, "buffer": 400},
}
register_method("sam-er", SAMER, "Experience replay with sharpness-aware minimization.", presets=_PRESETS)
