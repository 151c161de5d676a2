"""GPM, gradient projection memory (Saha, Garg and Roy, ICLR 2021): learn where earlier tasks had no inputs.

No replay. After each task the covered layers' bases grow by what they miss of the inputs on samples of that task; from
the second task on, each layer's gradient loses its part within the basis: G −= G M diag(λ) Mᵀ, with λ = 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from steppe.errors import UsageError
from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.sgd import MomentumSGD, clip_by_norm
from steppe.network.network import Network
from steppe.projection.importance import ImportanceRule, Ones
from steppe.projection.layers import ProjectedWeight, require_covered
from steppe.projection.memory import GradientMemory
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class GPM(MethodConfig):
    """Settings of GPM."""

    uses_projection = True

    lr: float = setting(0.01, "step size of SGD", above=0)
    momentum: float = setting(0.9, "momentum of SGD", at_least=0, below=1)
    clip: float = setting(0.0, "norm to which the gradient is clipped before projection; 0: never", at_least=0)
    basis_samples: int = setting(125, "samples of a task from which the bases grow (n_s)", at_least=1)
    thresholds: str = setting(
        "0.97",
        "share of energy the bases hold after the first task (ε): one number, or one per covered layer with commas",
    )
    threshold_step: float = setting(0.0, "what each further task adds to it (Δε)", at_least=0, at_most=1)
    freeze_norms: bool = setting(True, "leave scale and shift of normalisation layers alone from the second task on")

    def __post_init__(self) -> None:
        if isinstance(self.thresholds, (int, float)):  # a plain number is as good as its text
            object.__setattr__(self, "thresholds", str(self.thresholds))
        super().__post_init__()
        self._parse_thresholds()

    def _parse_thresholds(self) -> list[float]:
        """The thresholds as numbers."""
        try:
            shares = [float(part) for part in self.thresholds.split(",")]
        except ValueError:
            raise UsageError(
                f"thresholds = {self.thresholds!r}: write one number, or one per covered layer with commas between."
            ) from None
        for share in shares:
            if not 0 < share <= 1:
                raise UsageError(f"thresholds = {self.thresholds!r}: {share:g} is not above 0 and at most 1.")
        return shares

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """The method at work."""
        require_covered(covered)
        shares = self._parse_thresholds()
        if len(shares) == 1:
            shares = shares * len(covered)
        if len(shares) != len(covered):
            raise UsageError(
                f"thresholds = {self.thresholds!r} gives {len(shares)} numbers, but the model has {len(covered)} "
                f"covered layers ({', '.join(covered)}): give one number, or one for each of them."
            )
        return _GPM(self, network, covered, dict(zip(covered, shares, strict=True)), streams)

    def importance_rule(self) -> ImportanceRule:
        """What λ a task's directions get."""
        return Ones()


class _GPM(Method):
    descent: MomentumSGD
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
        self.settings, self.network, self.thresholds = settings, network, thresholds
        self.memory = GradientMemory(settings.importance_rule(), covered)
        self.descent = MomentumSGD(network, settings.lr, settings.momentum)
        self.tasks_done = 0
        self._pickers = streams.python_rng("basis draws"), streams.python_rng("basis pushes")
        self._samples = Reservoir(settings.basis_samples, *self._pickers)

    def begin_task(self) -> None:
        super().begin_task()
        if self.settings.freeze_norms and self.tasks_done:
            self.network.weights.freeze_norms()
        self._samples = Reservoir(self.settings.basis_samples, *self._pickers)

    def observe(self, batch: Batch) -> Tensor:
        loss, gradient = self.network.loss_and_grad(self.network.prepare(batch), factored=self.memory.linear)
        self.descent.step(self.memory.project_out(clip_by_norm(gradient, self.settings.clip)))
        return loss

    def after_batch(self, batch: Batch) -> None:
        self._samples.add(batch)

    def end_task(self) -> list[str]:
        """The bases grow by a uniform sample of the task, which is then dropped."""
        wanted, held = self.settings.basis_samples, len(self._samples)
        samples = self._samples.sample(wanted)
        if samples is None:
            return []
        raised = self.tasks_done * self.settings.threshold_step
        thresholds = {name: share + raised for name, share in self.thresholds.items()}
        memory, empty = copy.copy(self.memory), Reservoir(wanted, *self._pickers)
        remarks = memory.extend(self.network, samples.x, thresholds, first=self.tasks_done == 0)
        if wanted > held:
            remarks.append(f"basis_samples = {wanted} is more than the task has: {held} samples were used.")
        # At once: bases must not grow twice by the same task.
        self.memory, self._samples, self.tasks_done = memory, empty, self.tasks_done + 1
        return remarks

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": 0, **self.memory.memory_bytes()}

    def diagnostics(self) -> dict[str, Any]:
        """Ranks, and importances where they differ, of the basis that the task has made grow."""
        ranks = {"ranks": self.memory.ranks()}
        if isinstance(self.memory.rule, Ones):  # there is nothing to tell of λ
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
    "gpm", GPM, "Gradient projection memory: learn outside what earlier tasks' inputs span.", presets=PRESETS
)
