"""Finetune: plain SGD on whatever comes; the lower bound that forgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.sgd import MomentumSGD, clip_by_norm
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class Finetune(MethodConfig):
    """Settings of Finetune."""

    lr: float = setting(0.01, "step size of SGD", above=0)
    momentum: float = setting(0.9, "momentum of SGD", at_least=0, below=1)
    clip: float = setting(2.0, "norm to which the gradient is clipped; 0: never", at_least=0)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """Finetune at work."""
        return _Finetune(self, network)


class _Finetune(Method):
    descent: MomentumSGD
    uses_bare_batch = True
    state_attrs = ("descent",)

    def __init__(self, settings: Finetune, network: Network) -> None:
        self.settings, self.network = settings, network
        self.descent = MomentumSGD(network, settings.lr, settings.momentum)

    def observe(self, batch: Batch) -> Tensor:
        loss, gradient = self.network.loss_and_grad(self.network.prepare(batch), as_factors=True)
        self.descent.step(clip_by_norm(gradient, self.settings.clip))
        return loss


PRESETS = {
    benchmark: {"lr": 0.01}
    for benchmark in ("pmnist", "pmnist-60k", "cifar100-split", "cifar100-superclass", "tiny-imagenet")
}
register_method("finetune", Finetune, "Plain SGD on the current task; forgets.", presets=PRESETS)
