"""A-GEM (Chaudhry et al., 2019): GEM with a single constraint instead of one per task.

If the gradient g conflicts with a reference gradient of the past tasks, the conflicting component is removed:

    g ← g − (⟨g, g_ref⟩ / ⟨g_ref, g_ref⟩) g_ref    if ⟨g, g_ref⟩ < 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.fast.factored import ParamDict, to_dense
from steppe.methods.base import Method
from steppe.methods.parts.sgd import clip_by_norm
from steppe.methods.parts.task_memory_method import TaskMemoryConfig, TaskMemoryMethod, require_uniform_weights
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class AGEM(TaskMemoryConfig):
    """Settings of A-GEM."""

    reference: str = setting(
        "average",
        "reference gradient: the average of the past tasks' gradients, or that of a random batch of their samples",
        choices=("average", "batch"),
    )
    reference_samples: int = setting(256, "size of the random batch, for `batch`", at_least=1)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        if self.reference == "average":
            require_uniform_weights(network)
        return _AGEM(self, network, streams)


class _AGEM(TaskMemoryMethod[AGEM]):
    def __init__(self, settings: AGEM, network: Network, streams: Streams) -> None:
        super().__init__(settings, network)
        self._draws = streams.python_rng("replay draws")

    def require_batchable_memory(self) -> None:
        if self.settings.reference == "average":
            super().require_batchable_memory()
        else:
            self.memory.require_batchable_draws(self.settings.reference_samples)

    def observe(self, batch: Batch) -> Tensor:
        loss, gradient = self.network.loss_and_grad(self.network.prepare(batch))
        g = {name: to_dense(part) for name, part in clip_by_norm(gradient, self.settings.clip).items()}
        if len(self.memory.past):
            g = remove_conflict(g, self._reference())
        self.descent.step(g)
        return loss

    def _reference(self) -> ParamDict:
        """g_ref at the current weights."""
        if self.settings.reference == "average":
            count, network = len(self.memory.past), self.network
            share = torch.full((count,), 1 / count, dtype=network.dtype, device=network.device)
            return self.memory.past.gradients(self.settings.clip).combined(share)
        batch = self.memory.past.draw(self.settings.reference_samples, self._draws)
        _, gradient = self.network.loss_and_grad(batch, statistics=False)
        return {name: to_dense(part) for name, part in clip_by_norm(gradient, self.settings.clip).items()}


def remove_conflict(g: ParamDict, reference: ParamDict) -> ParamDict:
    """Remove the component of a gradient that conflicts with a reference gradient.

    Args:
        g: The gradient by parameter name.
        reference: The reference gradient.

    Returns:
        The gradient, orthogonal to the reference if their product was negative.
    """
    along = _product(g, reference)
    if along.is_cpu and not bool(along < 0):  # elsewhere, reading the sign would wait for the device
        return g
    share = torch.where(along < 0, along / _product(reference, reference), 0.0)
    return {name: part - share * reference[name] for name, part in g.items()}


def _product(a: ParamDict, b: ParamDict) -> Tensor:
    return torch.stack([torch.dot(part.flatten(), b[name].flatten()) for name, part in a.items()]).sum()


_PRESETS = {
    "pmnist": {"lr": 0.01, "memory": 200, "tasks": 20},
    "pmnist-60k": {"lr": 0.01, "memory": 1000, "tasks": 10},
    "cifar100-split": {"lr": 0.01, "memory": 1000, "tasks": 10},
    "cifar100-superclass": {"lr": 0.03, "memory": 1000, "tasks": 20},
    "tiny-imagenet": {"lr": 0.03, "memory": 400, "tasks": 40},
}
register_method("a-gem", AGEM, "GEM with one constraint: the past tasks' average gradient.", presets=_PRESETS)
