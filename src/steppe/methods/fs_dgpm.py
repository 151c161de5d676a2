"""FS-DGPM and its family (Algorithm 1): flatten sharpness within the gradient memory, learn outside it.

| member    | perturbation             | importances λ            |
| --------- | ------------------------ | ------------------------ |
| fs-dgpm   | ascent                   | the paper's rule         |
| fs-gpm    | ascent                   | 1                        |
| fs-sgpm   | ascent                   | spectral, fixed per task |
| la-dgpm   | descent (look-ahead), chunked | the paper's rule, climbing |
| dgpm      | only to move λ           | the paper's rule         |
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.sgd import MomentumSGD, clip_factor
from steppe.methods.parts.sharpness import PerturbedGradient, SharpnessAscent
from steppe.network.network import Network
from steppe.projection.importance import ImportanceRule, Ones, Sigmoid, Spectral
from steppe.projection.layers import ProjectedWeight, require_covered
from steppe.projection.memory import GradientMemory
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class FSDGPM(MethodConfig):
    """Settings of the family; the defaults are FS-DGPM as the paper runs it on Permuted MNIST."""

    uses_projection = True

    lr: float = setting(0.01, "step size of SGD (η3)", above=0)
    momentum: float = setting(0.9, "momentum of SGD", at_least=0, below=1)
    clip: float = setting(2.0, "norm to which the gradient is clipped before projection; 0: never", at_least=0)
    ascent_steps: int = setting(2, "steps of the perturbation (K)", at_least=1)
    ascent_lr: float = setting(0.05, "step size of the perturbation (η1)", above=0)
    ascent_clamp: float = setting(2.0, "bound on each element of a projected ascent gradient", above=0)
    ascent_form: str = setting(
        "whole",
        "each step on the whole batch (paper) or on a chunk of it (released code)",
        choices=("whole", "chunked"),
    )
    second_order: bool = setting(False, "differentiate through the ascent")
    statistics: str = setting(
        "once",
        "move BatchNorm's running statistics once per update, or in every forward pass of it (released code)",
        choices=("once", "every-forward"),
    )
    perturbation: str = setting(
        "ascend",
        "climb; look ahead by descending; or perturb for the importances alone",
        choices=("ascend", "look-ahead", "importance-only"),
    )
    importance: str = setting(
        "sigmoid", "rule for the importances λ of the bases", choices=("sigmoid", "ones", "spectral")
    )
    importance_lr: float = setting(0.01, "step size of the importances (η2), for `sigmoid`", at_least=0)
    temperature: float = setting(10.0, "temperature of the sigmoid, for `sigmoid`", above=0)
    alpha: float = setting(25.0, "how fast λ falls with the singular value, for `spectral`; larger: later", above=0)
    buffer: int = setting(200, "samples the replay buffer holds", at_least=1)
    basis_samples: int = setting(200, "samples drawn from the buffer to build the bases (n_s)", at_least=1)
    threshold: float = setting(0.99, "share of energy the bases hold after the first task (ε0)", above=0, at_most=1)
    threshold_step: float = setting(0.0005, "what each further task adds to it (Δε)", at_least=0, at_most=1)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """The method at work."""
        require_covered(covered)
        return _FSDGPM(self, network, covered, streams)

    def importance_rule(self) -> ImportanceRule:
        """The rule by which λ starts and moves."""
        if self.importance == "sigmoid":
            sign = -1 if self.perturbation == "look-ahead" else 1
            return Sigmoid(self.importance_lr, self.temperature, sign=sign)
        return Spectral(self.alpha) if self.importance == "spectral" else Ones()

    def ascent(self) -> SharpnessAscent:
        """How v is found."""
        lr = -self.ascent_lr if self.perturbation == "look-ahead" else self.ascent_lr
        return SharpnessAscent(
            lr,
            self.ascent_steps,
            self.ascent_clamp,
            self.ascent_form == "chunked",
            self.second_order,
            self.statistics == "every-forward",
        )


class _FSDGPM(Method):
    descent: MomentumSGD
    state_attrs = ("descent", "replay", "memory", "tasks_done")

    def __init__(
        self, settings: FSDGPM, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams
    ) -> None:
        self.settings, self.network = settings, network
        self.replay = Reservoir(
            settings.buffer, streams.python_rng("replay draws"), streams.python_rng("replay pushes")
        )
        self.memory = GradientMemory(settings.importance_rule(), covered)
        self.ascent = settings.ascent()
        self.descent = MomentumSGD(network, settings.lr, settings.momentum)
        self.tasks_done = 0
        self._importances_reached: dict[str, Any] = {}

    def begin_task(self) -> None:
        super().begin_task()
        self.ascent, self.memory.rule = self.settings.ascent(), self.settings.importance_rule()
        # The ascent sees D by itself; DGPM's serves Λ alone, where there is any to be moved.
        self.uses_bare_batch = self.settings.perturbation != "importance-only" or (
            bool(self.memory) and self.memory.rule.dynamic
        )

    def decay_lr(self, divisor: float) -> float:
        self.ascent, self.memory.rule = self.ascent.decay_lr(divisor), self.memory.rule.decay_lr(divisor)
        return super().decay_lr(divisor)

    def observe(self, batch: Batch) -> Tensor:
        union = self.network.prepare(batch.joined(self.replay.sample(len(batch))))  # D ∪ N
        current = union[: len(batch)]  # D

        # Sharpness evaluation: v, K steps within the memory; then L_{D∪N}(w + v) and its gradients.
        found = self._evaluate_sharpness(current, union)
        with torch.inference_mode():  # nothing from here on is differentiated
            # Dynamic gradient projection memory: Λ, from the second task on.
            self.memory.update_importances(found.importance_gradient)
            # Weight updating: w −= η3 · (I − M Λ Mᵀ) gradient, the gradient clipped as a whole.
            clip = clip_factor(found.gradient, self.settings.clip)
            self.descent.step(self.memory.project_out(found.gradient, found.coordinates), clip)
        return found.loss

    def _evaluate_sharpness(self, current: Batch, union: Batch) -> PerturbedGradient:
        if self.settings.perturbation != "importance-only":
            return self.ascent(self.network, self.memory, current, union)
        # DGPM: v serves Λ alone, and the step is taken with the gradient at w.
        slopes: Tensor | None = None
        if self.memory and self.memory.rule.dynamic:
            slopes = self.ascent(self.network, self.memory, current, union, statistics=False).importance_gradient
        loss, gradient = self.network.loss_and_grad(union, factored=self.memory.linear)
        return PerturbedGradient(loss, gradient, slopes)

    def after_batch(self, batch: Batch) -> None:
        self.replay.add(batch)

    def end_task(self) -> list[str]:
        """UpdateGPM: bases of the buffer's representations replace the old ones."""
        self._importances_reached = self.memory.importance_distributions()
        wanted, held = self.settings.basis_samples, len(self.replay)
        samples = self.replay.sample(min(wanted, held))
        threshold = self.settings.threshold + self.tasks_done * self.settings.threshold_step
        memory = copy.copy(self.memory)
        remarks = [] if samples is None else memory.rebuild(self.network, samples.x, threshold)
        if wanted > held:
            remarks.append(f"basis_samples = {wanted} is more than the buffer holds: {held} samples were used.")
        self.memory, self.tasks_done = memory, self.tasks_done + 1  # at once, or not at all
        return remarks

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": self.replay.memory_bytes(), **self.memory.memory_bytes()}

    def diagnostics(self) -> dict[str, Any]:
        """Importances as the task left them, of the basis it was learnt with; ranks of the basis built since."""
        return {"importances": self._importances_reached, "ranks": self.memory.ranks()}


_PMNIST = {"ascent_lr": 0.05, "buffer": 200, "basis_samples": 200, "threshold": 0.99, "threshold_step": 0.0005}
_PRESETS = {
    "pmnist": _PMNIST,
    "pmnist-60k": {**_PMNIST, "buffer": 1000},
    "cifar100-split": {
        "ascent_lr": 0.001,
        "buffer": 1000,
        "basis_samples": 125,
        "threshold": 0.97,
        "threshold_step": 0.003,
    },
    "cifar100-superclass": {
        "ascent_lr": 0.01,
        "buffer": 1000,
        "basis_samples": 125,
        "threshold": 0.98,
        "threshold_step": 0.001,
    },
    "tiny-imagenet": {
        "ascent_lr": 0.001,
        "buffer": 400,
        "basis_samples": 200,
        "threshold": 0.90,
        "threshold_step": 0.0025,
    },
}
register_method(
    "fs-dgpm", FSDGPM, "Flattened sharpness, dynamic gradient projection memory: the paper's method.", presets=_PRESETS
)
register_method(
    "fs-gpm", FSDGPM, "FS-DGPM with hard projection (λ = 1).", variant={"importance": "ones"}, presets=_PRESETS
)
register_method(
    "fs-sgpm",
    FSDGPM,
    "FS-DGPM with importances from the singular values: the strongest on Permuted MNIST.",
    variant={"importance": "spectral"},
    presets={
        **_PRESETS,
        "pmnist": {**_PRESETS["pmnist"], "ascent_form": "chunked", "ascent_lr": 0.075, "alpha": 25.0},
    },
)
register_method(
    "dgpm",
    FSDGPM,
    "FS-DGPM whose perturbation serves the importances alone.",
    variant={"perturbation": "importance-only"},
    presets=_PRESETS,
)
register_method(
    "la-dgpm",
    FSDGPM,
    "FS-DGPM that looks ahead downhill instead of perturbing uphill.",
    variant={"perturbation": "look-ahead", "ascent_form": "chunked"},
    presets=_PRESETS,
)
