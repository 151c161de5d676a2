"""ER and FS-ER: experience replay, without and with flattened sharpness (Algorithm FS-ER).

With D the batch and N a sample of the replay buffer, one update of FS-ER is

    v = 0;   K times:   v ← v + η1 · ∇L_{D∪N}(w + v)
    w ← w − η3 · ∇L_{D∪N}(w + v)

in the full space, without projection. ER is the same with K = 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from steppe.methods.base import Method
from steppe.methods.parts.replay_method import ReplayConfig, ReplayMethod
from steppe.methods.parts.sgd import clip_by_norm
from steppe.methods.parts.sharpness import SharpnessAscent
from steppe.network.network import Network
from steppe.projection.importance import Ones
from steppe.projection.layers import ProjectedWeight
from steppe.projection.memory import GradientMemory
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class ER(ReplayConfig):
    """Settings of ER and FS-ER."""

    lr: float = setting(0.01, "SGD learning rate (η3)", above=0)
    ascent_steps: int = setting(0, "ascent steps of the perturbation (K); 0 gives plain ER", at_least=0)
    ascent_lr: float = setting(0.05, "step size of an ascent step (η1)", above=0)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        return _ER(self, network, streams)


class _ER(ReplayMethod[ER]):
    def __init__(self, settings: ER, network: Network, streams: Streams) -> None:
        super().__init__(settings, network, streams)
        self.ascent = self._initial_ascent()
        self._full_space = GradientMemory(Ones())  # an empty memory passes gradients through

    def _initial_ascent(self) -> SharpnessAscent | None:
        return (
            SharpnessAscent(self.settings.ascent_lr, self.settings.ascent_steps) if self.settings.ascent_steps else None
        )

    def begin_task(self) -> None:
        super().begin_task()
        self.ascent = self._initial_ascent()

    def decay_lr(self, divisor: float) -> float:
        self.ascent = None if self.ascent is None else self.ascent.decay_lr(divisor)
        return super().decay_lr(divisor)

    def observe(self, batch: Batch) -> Tensor:
        union = self.network.prepare(batch.joined(self.replay.sample(len(batch))))  # D ∪ N
        if self.ascent is None:
            loss, gradient = self.network.loss_and_grad(union, as_factors=True)
        else:
            perturbed = self.ascent(self.network, self._full_space, union, union)
            loss, gradient = perturbed.loss, perturbed.gradient
        self.descent.step(clip_by_norm(gradient, self.settings.clip))
        return loss


_PRESETS = {
    "pmnist": {"lr": 0.005, "buffer": 200},
    "pmnist-60k": {"lr": 0.005, "buffer": 1000},
    "cifar100-split": {"lr": 0.03, "buffer": 1000, "ascent_lr": 0.001},
    "cifar100-superclass": {"lr": 0.01, "buffer": 1000, "ascent_lr": 0.01},
    "tiny-imagenet": {"lr": 0.01, "buffer": 400, "ascent_lr": 0.001},
}
register_method("er", ER, "Experience replay from a reservoir buffer.", presets=_PRESETS)
# The paper does not give FS-ER's η1. We use FS-DGPM's, except on Permuted MNIST, where we use the released script's:
# without a projection FS-DGPM's is too large there, and FS-ER learns less than ER.
_FS_PRESETS = {**_PRESETS, "pmnist": {**_PRESETS["pmnist"], "ascent_lr": 0.01}}
register_method(
    "fs-er",
    ER,
    "ER with the gradient taken at weights perturbed uphill.",
    variant={"ascent_steps": 2},
    presets=_FS_PRESETS,
)
