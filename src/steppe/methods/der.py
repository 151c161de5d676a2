"""DER++ (Buzzega et al., 2020): replay of samples together with the logits the model once gave them.

    loss = CE(D) + α · mean (z − f(x))² over a draw (x, z) of the buffer + β · CE over a second draw

z is the model's raw output, all rows of it, from the last update made on the sample before it was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

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
class DERPlusPlus(MethodConfig):
    """Settings of DER++."""

    lr: float = setting(0.01, "step size of SGD", above=0)
    momentum: float = setting(0.9, "momentum of SGD", at_least=0, below=1)
    clip: float = setting(2.0, "norm to which the gradient is clipped; 0: never", at_least=0)
    buffer: int = setting(200, "samples the replay buffer holds, each with its logits", at_least=1)
    alpha: float = setting(0.5, "weight of the distance to the stored logits (α)", at_least=0)
    beta: float = setting(0.5, "weight of the replayed cross-entropy (β); 0: DER", at_least=0)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """DER++ at work."""
        return _DERPlusPlus(self, network, streams)


class _DERPlusPlus(Method):
    descent: MomentumSGD
    state_attrs = ("descent", "replay")

    def __init__(self, settings: DERPlusPlus, network: Network, streams: Streams) -> None:
        self.settings, self.network = settings, network
        self.replay = Reservoir(
            settings.buffer, streams.python_rng("replay draws"), streams.python_rng("replay pushes")
        )
        self.descent = MomentumSGD(network, settings.lr, settings.momentum)
        self._output = torch.empty(0, device="cpu")  # of the batch observed last

    def observe(self, batch: Batch) -> Tensor:
        noted, labelled = self.replay.sample_with_extras(len(batch)), self.replay.sample(len(batch))
        union = self.network.prepare(batch.joined(None if noted is None else noted[0]).joined(labelled))
        output = self.network.forward(union.x)  # one forward: running statistics move once
        masked = self.network.heads.mask(output, union.task)

        new = slice(0, len(batch))
        loss = cross_entropy(masked[new], union.y[new])
        if noted is not None and labelled is not None:
            distilled = slice(len(batch), len(batch) + len(noted[1]))
            rehearsed = slice(distilled.stop, None)
            loss = loss + self.settings.alpha * mse_loss(output[distilled], noted[1])
            loss = loss + self.settings.beta * cross_entropy(masked[rehearsed], union.y[rehearsed])
        self._output = output[new].detach()
        self.descent.step(clip_by_norm(self.network.gradient_of(loss), self.settings.clip))
        return loss.detach()

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
register_method("der++", DERPlusPlus, "Replay of samples and of the logits they once had.", presets=_PRESETS)
