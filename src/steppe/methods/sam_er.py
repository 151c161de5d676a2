"""SAM-ER: replay of a reservoir with sharpness-aware minimisation (Foret et al., 2021) on D ∪ N.

v = ρ g / ‖g‖ with g = ∇L_{D∪N}(w),    w ← w − lr · ∇L_{D∪N}(w + v)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.fast.factored import Gradient, ParamDict, to_dense
from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.sgd import MomentumSGD, clip_by_norm
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class SAMER(MethodConfig):
    """Settings of SAM-ER."""

    lr: float = setting(0.01, "step size of SGD", above=0)
    momentum: float = setting(0.9, "momentum of SGD", at_least=0, below=1)
    clip: float = setting(2.0, "norm to which the gradient at w + v is clipped; 0: never", at_least=0)
    buffer: int = setting(200, "samples the replay buffer holds", at_least=1)
    rho: float = setting(0.05, "length of the perturbation v (ρ)", above=0)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """SAM-ER at work."""
        return _SAMER(self, network, streams)


class _SAMER(Method):
    descent: MomentumSGD
    state_attrs = ("descent", "replay")

    def __init__(self, settings: SAMER, network: Network, streams: Streams) -> None:
        self.settings, self.network = settings, network
        self.replay = Reservoir(
            settings.buffer, streams.python_rng("replay draws"), streams.python_rng("replay pushes")
        )
        self.descent = MomentumSGD(network, settings.lr, settings.momentum)

    def observe(self, batch: Batch) -> Tensor:
        union = self.network.prepare(batch.joined(self.replay.sample(len(batch))))  # D ∪ N
        _, uphill = self.network.loss_and_grad(union, statistics=False)
        loss, gradient = self.network.loss_and_grad(
            union, at=self.network.scratch.perturbed(scale_to_norm(uphill, self.settings.rho)), as_factors=True
        )
        self.descent.step(clip_by_norm(gradient, self.settings.clip))
        return loss

    def after_batch(self, batch: Batch) -> None:
        self.replay.add(batch)

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": self.replay.memory_bytes(), "bases": 0}


def scale_to_norm(gradient: Gradient, length: float) -> ParamDict:
    """The direction of the gradient over all weights together, with the given length; no direction where it is 0."""
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
register_method("sam-er", SAMER, "Experience replay with sharpness-aware minimisation.", presets=_PRESETS)
