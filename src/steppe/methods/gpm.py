"""GPM, gradient projection memory (Saha, Garg and Roy, ICLR 2021): learn outside the span of earlier tasks' inputs.

No replay. From the second task on, each covered layer's gradient is projected, with λ = 1:

    G ← G − G M diag(λ) Mᵀ

After each task the basis M of each layer is extended by what it misses of the layer's inputs on samples of the task.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from steppe.errors import UsageError
from steppe.methods.base import Method
from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.sgd import clip_by_norm
from steppe.methods.parts.sgd_method import SGDConfig, SGDMethod
from steppe.network.network import Network
from steppe.projection.importance import ImportanceRule, Ones
from steppe.projection.layers import ProjectedWeight, require_covered
from steppe.projection.memory import GradientMemory
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class GPM(SGDConfig):
    """Settings of GPM."""

    uses_projection = True

    clip: float = setting(0.0, "maximum gradient norm before projection; 0 disables clipping", at_least=0)
    basis_samples: int = setting(125, "samples of a task from which the bases are extended (n_s)", at_least=1)
    thresholds: str = setting(
        "0.97",
        "share of the inputs' energy that the bases hold after the first task (ε): one number, or one per projected "
        "layer, separated by commas",
    )
    threshold_step: float = setting(
        0.0, "increase of the thresholds with each further task (Δε)", at_least=0, at_most=1
    )
    freeze_norms: bool = setting(True, "freeze the scales and shifts of normalization layers from the second task on")

    def __post_init__(self) -> None:
        if isinstance(self.thresholds, (int, float)):  # a number is accepted as well
            object.__setattr__(self, "thresholds", str(self.thresholds))
        super().__post_init__()
        self._parse_thresholds()

    def _parse_thresholds(self) -> list[float]:
        """Parse the thresholds."""
        try:
            shares = [float(part) for part in self.thresholds.split(",")]
        except ValueError:
            raise UsageError(
                f"thresholds = {self.thresholds!r} is invalid: pass one number, or one per layer, separated by commas."
            ) from None
        for share in shares:
            if not 0 < share <= 1:
                raise UsageError(
                    f"thresholds = {self.thresholds!r}: {share:g} is out of range: it must be above 0 and at most 1."
                )
        return shares

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        require_covered(covered)
        shares = self._parse_thresholds()
        if len(shares) == 1:
            shares = shares * len(covered)
        if len(shares) != len(covered):
            raise UsageError(
                f"thresholds = {self.thresholds!r} has {len(shares)} numbers, but the model has {len(covered)} "
                f"projected layers ({', '.join(covered)}): pass one number, or one per layer."
            )
        return _GPM(self, network, covered, dict(zip(covered, shares, strict=True)), streams)

    def importance_rule(self) -> ImportanceRule:
        """The importances λ of new directions."""
        return Ones()


class _GPM(SGDMethod[GPM]):
    uses_bare_batch = True
    state_attrs = ("descent", "memory", "tasks_done", "_samples")

    def __init__(
        self,
        settings: GPM,
        network: Network,
        covered: Mapping[str, ProjectedWeight],
        thresholds: Mapping[str, float],
        streams: Streams,
    ) -> None:
        super().__init__(settings, network)
        self.thresholds = thresholds
        self.memory = GradientMemory(settings.importance_rule(), covered)
        self.tasks_done = 0
        self._streams = streams
        self._samples = self._empty_reservoir()

    def _empty_reservoir(self) -> Reservoir:
        return Reservoir.from_streams(self.settings.basis_samples, self._streams, "basis")

    def begin_task(self) -> None:
        super().begin_task()
        if self.settings.freeze_norms and self.tasks_done:
            self.network.weights.freeze_norms()
        self._samples = self._empty_reservoir()

    def observe(self, batch: Batch) -> Tensor:
        loss, gradient = self.network.loss_and_grad(self.network.prepare(batch), factored=self.memory.linear)
        self.descent.step(clip_by_norm(gradient, self.settings.clip), outside=self.memory)
        return loss

    def after_batch(self, batch: Batch) -> None:
        self._samples.add(batch)

    def end_task(self) -> list[str]:
        """Extend the bases with a uniform sample of the task, then drop the sample."""
        requested, available = self.settings.basis_samples, len(self._samples)
        samples = self._samples.sample(requested)
        if samples is None:
            return []
        increase = self.tasks_done * self.settings.threshold_step
        thresholds = {name: share + increase for name, share in self.thresholds.items()}
        memory, empty = copy.copy(self.memory), self._empty_reservoir()
        remarks = memory.extend(self.network, samples.x, thresholds, first=self.tasks_done == 0)
        if requested > available:
            remarks.append(f"basis_samples = {requested} exceeds the task's {available} samples: all were used.")
        # In one statement: an interrupt must not leave bases that would be extended twice by the same task.
        self.memory, self._samples, self.tasks_done = memory, empty, self.tasks_done + 1
        return remarks

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": 0, **self.memory.memory_bytes()}

    def diagnostics(self) -> dict[str, Any]:
        """The ranks of the bases after the task, and their importances unless all are 1."""
        ranks = {"ranks": self.memory.ranks()}
        if isinstance(self.memory.rule, Ones):
            return ranks
        return {"importances": self.memory.importance_distributions(), **ranks}


PRESETS = {
    "pmnist": {"lr": 0.01, "basis_samples": 300, "thresholds": "0.95,0.99,0.99", "threshold_step": 0.0},
    "pmnist-60k": {"lr": 0.01, "basis_samples": 300, "thresholds": "0.95,0.99,0.99", "threshold_step": 0.0},
    "cifar100-split": {"lr": 0.01, "basis_samples": 125, "thresholds": "0.97", "threshold_step": 0.003},
    "cifar100-superclass": {"lr": 0.01, "basis_samples": 125, "thresholds": "0.98", "threshold_step": 0.001},
    "tiny-imagenet": {"lr": 0.005, "basis_samples": 200, "thresholds": "0.9", "threshold_step": 0.0025},
}
register_method(
    "gpm", GPM, "Gradient projection memory: learn outside the span of earlier tasks' inputs.", presets=PRESETS
)
