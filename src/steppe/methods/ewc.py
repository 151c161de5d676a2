"""EWC (Kirkpatrick et al., 2017), in the form the paper's comparison uses: weights that mattered are held back.

    loss = cross-entropy + strength · Σ_τ Σ_i F_τi (w_i − w*_τi)²

over all past tasks τ, with w*_τ the weights at their end and F_τ the square of the gradient of the mean cross-entropy
on a few of their samples: a squared batch gradient, not a per-sample Fisher information.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.fast.factored import ParamDict, to_dense
from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.sgd import MomentumSGD, clip_by_norm
from steppe.methods.parts.single_sample import require_batchable
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class EWC(MethodConfig):
    """Settings of EWC."""

    lr: float = setting(0.01, "step size of SGD", above=0)
    momentum: float = setting(0.9, "momentum of SGD", at_least=0, below=1)
    clip: float = setting(2.0, "norm to which the gradient, penalty included, is clipped; 0: never", at_least=0)
    strength: float = setting(100.0, "weight of the penalty (γ)", at_least=0)
    samples: int = setting(10, "samples of a task, its first, that give the importances (n_mem)", at_least=1)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """EWC at work."""
        return _EWC(self, network)


class _EWC(Method):
    descent: MomentumSGD
    uses_bare_batch = True
    state_attrs = ("descent", "penalty", "first")

    def __init__(self, settings: EWC, network: Network) -> None:
        self.settings, self.network = settings, network
        self.penalty = Penalty(network.trainable)
        self.descent = MomentumSGD(network, settings.lr, settings.momentum)
        self.first: Batch | None = None  # the current task's first samples

    def begin_task(self) -> None:
        self.first = None
        super().begin_task()

    def observe(self, batch: Batch) -> Tensor:
        if self.first is None and self.settings.samples == 1:
            alone = self.network.prepare(batch[:1])
            cause = "samples = 1 takes the importances of a task from a single sample"
            require_batchable(self.network, alone, cause, "set samples to 2 or more")
        loss, gradient = self.network.loss_and_grad(self.network.prepare(batch))
        if self.penalty.tasks:
            value, slope = self.penalty(self.network.trainable)
            loss = loss + self.settings.strength * value
            gradient = {
                name: torch.add(to_dense(g), slope[name], alpha=self.settings.strength) for name, g in gradient.items()
            }
        self.descent.step(clip_by_norm(gradient, self.settings.clip))
        return loss

    def after_batch(self, batch: Batch) -> None:
        held = 0 if self.first is None else len(self.first)
        if held < self.settings.samples:
            new = batch[: self.settings.samples - held]
            self.first = new if self.first is None else self.first.joined(new)

    def end_task(self) -> list[str]:
        """F of the task just learnt, at the weights it leaves."""
        if self.first is not None:
            _, gradient = self.network.loss_and_grad(self.network.prepare(self.first), statistics=False)
            importance = {name: to_dense(g).square() for name, g in gradient.items()}
            penalty = copy.copy(self.penalty)
            penalty.add(importance, self.network.trainable)
            self.penalty, self.first = penalty, None  # at once: a task must not count twice
        return []

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": 0, "bases": 0, **self.penalty.memory_bytes()}


class Penalty:
    """Σ_τ Σ_i F_τi (w_i − w*_τi)² over any number of tasks, from two vectors and a number.

    A sum of parabolas in w_i is one parabola and a constant: F_i (w_i − c_i)² + s, with F_i = Σ_τ F_τi, the centre
    c_i = Σ_τ F_τi w*_τi / F_i, and s what the w*_τ scatter about it. A new task moves the centre by its share of F_i.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.tasks = 0
        self.importance: ParamDict = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.centre: ParamDict = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.scatter = torch.zeros((), dtype=torch.float64, device="cpu")
        self._scatter: Tensor | None = None  # the same as the weights are, and where they are

    def add(self, importance: ParamDict, weights: Mapping[str, Tensor]) -> None:
        """One more task: its F and the weights it ended with."""
        importances, centres, scatter = dict(self.importance), dict(self.centre), self.scatter.clone()
        with torch.no_grad():
            for name, new in importance.items():
                old, centre = self.importance[name], self.centre[name]
                total = old + new
                distance = weights[name] - centre
                share = new / total.clamp(min=torch.finfo(total.dtype).tiny)  # 0 where no task ever cared
                scatter += (old * share * distance.square()).sum().double().cpu()
                importances[name], centres[name] = total, centre + share * distance
        self.importance, self.centre, self.scatter = importances, centres, scatter
        self.tasks, self._scatter = self.tasks + 1, None

    def __call__(self, weights: Mapping[str, Tensor]) -> tuple[Tensor, ParamDict]:
        """The penalty and its gradient at the weights."""
        with torch.no_grad():
            distance = {name: w - self.centre[name] for name, w in weights.items()}
            half = {name: self.importance[name] * d for name, d in distance.items()}
            value = torch.stack([torch.dot(half[name].flatten(), d.flatten()) for name, d in distance.items()]).sum()
            if self._scatter is None:
                self._scatter = self.scatter.to(value)
            return value + self._scatter, {name: h.mul_(2) for name, h in half.items()}

    def state_dict(self) -> State:
        """All of it."""
        return {name: getattr(self, name) for name in ("tasks", "importance", "centre", "scatter")}

    def load_state_dict(self, state: State) -> None:
        """The same penalty again."""
        for part in (self.importance, self.centre):
            if part.keys() != state["importance"].keys() or part.keys() != state["centre"].keys():
                raise ValueError("importances and centres are not those of the weights")
        for name, weight in self.importance.items():
            if not weight.shape == state["importance"][name].shape == state["centre"][name].shape:
                raise ValueError(f"importance and centre of {name!r} are not of the weight's shape")
        self.tasks, self.importance, self.centre = state["tasks"], state["importance"], state["centre"]
        self.scatter, self._scatter = state["scatter"].cpu(), None

    def memory_bytes(self) -> dict[str, int]:
        """The two vectors, by kind: as much after the hundredth task as after the first."""
        return {
            "importances": sum(part.nbytes for part in self.importance.values()),
            "weights": sum(part.nbytes for part in self.centre.values()),
        }


_PRESETS = {
    "pmnist": {"lr": 0.01, "strength": 100.0, "samples": 10},
    "pmnist-60k": {"lr": 0.01, "strength": 100.0, "samples": 10},
    "cifar100-split": {"lr": 0.005, "strength": 5000.0, "samples": 64},
    "cifar100-superclass": {"lr": 0.03, "strength": 1000.0, "samples": 64},
    "tiny-imagenet": {"lr": 0.01, "strength": 1000.0, "samples": 64},  # our choice: no one reports it
}
register_method("ewc", EWC, "Elastic weight consolidation: a pull back on weights that mattered.", presets=_PRESETS)
