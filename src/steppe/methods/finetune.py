"""Finetune: plain SGD on the current task; the lower bound that forgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from steppe.methods.base import Method
from steppe.methods.parts.sgd import clip_by_norm
from steppe.methods.parts.sgd_method import SGDConfig, SGDMethod
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class Finetune(SGDConfig):
    """Settings of Finetune.

    Example:
        >>> import steppe, torch
        >>> learner = steppe.Learner(torch.nn.Linear(4, 2), steppe.Finetune(lr=0.1))
        >>> _ = learner.learn(steppe.Task((torch.randn(20, 4), torch.arange(20) % 2)))
        >>> learner.predict(torch.randn(3, 4)).shape
        torch.Size([3])
    """

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        return _Finetune(self, network)


class _Finetune(SGDMethod[Finetune]):
    uses_bare_batch = True

    def observe(self, batch: Batch) -> Tensor:
        loss, gradient = self.network.loss_and_grad(self.network.prepare(batch), as_factors=True)
        self.descent.step(clip_by_norm(gradient, self.settings.clip))
        return loss


PRESETS = {
    benchmark: {"lr": 0.01}
    for benchmark in ("pmnist", "pmnist-60k", "cifar100-split", "cifar100-superclass", "tiny-imagenet")
}
register_method("finetune", Finetune, "Plain SGD on the current task; forgets.", presets=PRESETS)
