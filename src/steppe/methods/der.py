"""DER++ (Buzzega et al., 2020): replay of samples together with the model's logits from when it learned them.

With D the batch, (x, z) a sample of the buffer with its stored logits and (x′, y′) a second, independent one,

    loss = CE(D) + α · mean (z − f(x))² + β · CE(f(x′), y′)

z is the model's raw output, all of it, from the last update on the batch before it was stored. Outputs that the model
has gained since are not in z, and left out of the mean. CE is cross-entropy, or the learner's own loss; z may be an
output of any shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from steppe.methods.base import Method
from steppe.methods.parts.replay_method import ReplayConfig, ReplayMethod
from steppe.methods.parts.sgd import clip_by_norm
from steppe.network.growing_head import GrowingHead
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class DERPlusPlus(ReplayConfig):
    """Settings of DER++."""

    buffer: int = setting(200, "replay buffer size in samples, each stored with its logits", at_least=1)
    alpha: float = setting(0.5, "weight of the distance to the stored logits (α)", at_least=0)
    beta: float = setting(0.5, "weight of the replayed cross-entropy (β); 0 gives DER", at_least=0)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        return _DERPlusPlus(self, network, streams)


class _DERPlusPlus(ReplayMethod[DERPlusPlus]):
    def __init__(self, settings: DERPlusPlus, network: Network, streams: Streams) -> None:
        super().__init__(settings, network, streams)
        self._output = torch.empty(0, device="cpu")  # on the last batch observed

    def grow_head(self, head: GrowingHead) -> None:
        super().grow_head(head)
        self.replay.widen_extras(head.rows)

    def observe(self, batch: Batch) -> Tensor:
        with_logits = self.replay.sample_with_extras(len(batch))  # x, z
        labeled = self.replay.sample(len(batch))  # x′, y′
        union = self.network.prepare(batch.joined(None if with_logits is None else with_logits[0]).joined(labeled))
        output = self.network.forward(union.x)  # a single forward, so that running statistics are updated once
        mean_loss = self.network.output_loss.loss

        new = slice(0, len(batch))
        loss = mean_loss(output[new], union[new])
        if with_logits is not None and labeled is not None:
            z = with_logits[1]
            distilled = slice(len(batch), len(batch) + len(z))
            rehearsed = slice(distilled.stop, None)
            loss = loss + self.settings.alpha * self._distance(output[distilled], z)
            loss = loss + self.settings.beta * mean_loss(output[rehearsed], union[rehearsed])
        self._output = output[new].detach()
        self.descent.step(clip_by_norm(self.network.gradient_of(loss), self.settings.clip))
        return loss.detach()

    def _distance(self, output: Tensor, z: Tensor) -> Tensor:
        """The mean of (z − f(x))² over the logits that were stored, which a head that has grown has more of now."""
        if not self.replay.has_partial_extras:
            return mse_loss(output, z)
        stored = ~z.isnan()
        return torch.where(stored, output - z, 0.0).square().sum() / stored.sum()

    def after_batch(self, batch: Batch) -> None:
        self.replay.add(batch, self._output)

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": self.replay.memory_bytes(), "logits": self.replay.extras_bytes(), "bases": 0}


_PRESETS = {
    "pmnist": {"lr": 0.005, "buffer": 200, "alpha": 1.0, "beta": 1.0},
    "pmnist-60k": {"lr": 0.005, "buffer": 1000, "alpha": 1.0, "beta": 1.0},
    "cifar100-split": {"lr": 0.03, "buffer": 1000, "alpha": 0.1, "beta": 0.5},
    "cifar100-superclass": {"lr": 0.01, "buffer": 1000, "alpha": 0.1, "beta": 0.5},
    "tiny-imagenet": {"lr": 0.01, "buffer": 400, "alpha": 0.2, "beta": 0.5},
}
register_method("der++", DERPlusPlus, "Replay of samples and of the logits the model had for them.", presets=_PRESETS)
