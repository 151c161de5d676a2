"""EWC (Kirkpatrick et al., 2017), as in the paper's comparison: a penalty for moving important weights.

    loss = cross-entropy + strength · Σ_τ Σ_i F_τi (w_i − w*_τi)²

over all past tasks τ, with w*_τ the weights at the end of the task and F_τ the elementwise square of the gradient of
the mean cross-entropy on a few of its samples: a squared batch gradient, not a per-sample Fisher information.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.fast.factored import ParamDict, to_dense
from steppe.methods.base import Method
from steppe.methods.parts.sgd import clip_by_norm
from steppe.methods.parts.sgd_method import SGDConfig, SGDMethod
from steppe.methods.parts.single_sample_checks import require_batchable
from steppe.network.growing_head import GrowingHead
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.settings import log_range, setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class EWC(SGDConfig):
    """Settings of EWC."""

    clip: float = setting(2.0, "maximum norm of the gradient, penalty included; 0 disables clipping", at_least=0)
    strength: float = setting(100.0, "weight of the penalty (γ)", at_least=0, search=log_range(1, 1e5))
    samples: int = setting(
        10, "number of samples, a task's first, from which importances are computed (n_mem)", at_least=1
    )

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        return _EWC(self, network)


class _EWC(SGDMethod[EWC]):
    uses_bare_batch = True
    state_attrs = ("descent", "penalty", "first")

    def __init__(self, settings: EWC, network: Network) -> None:
        super().__init__(settings, network)
        self.penalty = Penalty(network.trainable)
        self.first: Batch | None = None  # the current task's first samples

    def begin_task(self) -> None:
        self.first = None
        super().begin_task()

    def grow_head(self, head: GrowingHead) -> None:
        super().grow_head(head)
        self.penalty.grow_head(head)

    def observe(self, batch: Batch) -> Tensor:
        if self.first is None and self.settings.samples == 1:
            alone = self.network.prepare(batch[:1])
            cause = "samples = 1 computes a task's importances from a single sample"
            require_batchable(self.network, alone, cause, "set samples to 2 or more")
        loss, gradient = self.network.loss_and_grad(self.network.prepare(batch))
        if self.penalty.tasks:
            value, penalty_gradient = self.penalty(self.network.trainable)
            loss = loss + self.settings.strength * value
            gradient = {
                name: torch.add(to_dense(g), penalty_gradient[name], alpha=self.settings.strength)
                for name, g in gradient.items()
            }
        self.descent.step(clip_by_norm(gradient, self.settings.clip))
        return loss

    def after_batch(self, batch: Batch) -> None:
        stored = 0 if self.first is None else len(self.first)
        if stored < self.settings.samples:
            new = batch[: self.settings.samples - stored]
            self.first = new if self.first is None else self.first.joined(new)

    def end_task(self) -> list[str]:
        """Add the penalty of the task just learned, with F at its final weights."""
        if self.first is not None:
            _, gradient = self.network.loss_and_grad(self.network.prepare(self.first), statistics=False)
            importance = {name: to_dense(g).square() for name, g in gradient.items()}
            penalty = copy.copy(self.penalty)
            penalty.add(importance, self.network.trainable)
            self.penalty, self.first = penalty, None  # in one statement, so that no task counts twice
        return []

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": 0, "bases": 0, **self.penalty.memory_bytes()}


class Penalty:
    """Σ_τ Σ_i F_τi (w_i − w*_τi)² over any number of tasks, in the memory of two copies of the weights.

    A sum of parabolas in w_i is one parabola plus a constant: F_i (w_i − c_i)² + s, with F_i = Σ_τ F_τi, the center
    c_i = Σ_τ F_τi w*_τi / F_i, and s the scatter of the w*_τ about it. A new task moves the center by its share of F_i.

    Args:
        weights: The weights to penalize, by parameter name.

    Example:
        >>> import torch
        >>> from steppe.methods.ewc import Penalty
        >>> penalty = Penalty({"w": torch.zeros(1)})
        >>> penalty.add({"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])})
        >>> value, gradient = penalty({"w": torch.tensor([3.0])})  # 2 · (3 − 1)² and 2 · 2 · (3 − 1)
        >>> float(value), gradient["w"].tolist()
        (8.0, [8.0])
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.tasks = 0
        self.importance: ParamDict = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.centre: ParamDict = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.scatter = torch.zeros((), dtype=torch.float64, device="cpu")
        self._scatter: Tensor | None = None  # a copy with the weights' type and device

    def add(self, importance: ParamDict, weights: Mapping[str, Tensor]) -> None:
        """Add a task.

        Args:
            importance: Its F, by parameter name.
            weights: The weights at its end, w*.
        """
        importances, centres, scatter = dict(self.importance), dict(self.centre), self.scatter.clone()
        with torch.no_grad():
            for name, new in importance.items():
                old, centre = self.importance[name], self.centre[name]
                total = old + new
                distance = weights[name] - centre
                share = new / total.clamp(min=torch.finfo(total.dtype).tiny)  # 0 for a weight that no task uses
                scatter += (old * share * distance.square()).sum().double().cpu()
                importances[name], centres[name] = total, centre + share * distance
        self.importance, self.centre, self.scatter = importances, centres, scatter
        self.tasks, self._scatter = self.tasks + 1, None

    def __call__(self, weights: Mapping[str, Tensor]) -> tuple[Tensor, ParamDict]:
        """Evaluate the penalty.

        Args:
            weights: The current weights.

        Returns:
            The penalty and its gradient.
        """
        with torch.no_grad():
            distance = {name: w - self.centre[name] for name, w in weights.items()}
            half = {name: self.importance[name] * d for name, d in distance.items()}
            value = torch.stack([torch.dot(half[name].flatten(), d.flatten()) for name, d in distance.items()]).sum()
            if self._scatter is None:
                self._scatter = self.scatter.to(value)
            return value + self._scatter, {name: h.mul_(2) for name, h in half.items()}

    def grow_head(self, head: GrowingHead) -> None:
        """Extend F and c of an output layer that has grown by zeros: no task needs its new weights.

        Args:
            head: The layer.
        """
        self.importance = {name: head.fit(name, part) for name, part in self.importance.items()}
        self.centre = {name: head.fit(name, part) for name, part in self.centre.items()}

    def state_dict(self) -> State:
        """The number of tasks, F, c and s.

        Returns:
            The state.
        """
        return {name: getattr(self, name) for name in ("tasks", "importance", "centre", "scatter")}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If it belongs to other weights.
        """
        for part in (self.importance, self.centre):
            if part.keys() != state["importance"].keys() or part.keys() != state["centre"].keys():
                raise ValueError("the penalty's parameter names do not match the model's")
        for name, weight in self.importance.items():
            if not weight.shape == state["importance"][name].shape == state["centre"][name].shape:
                raise ValueError(f"the penalty of {name!r} does not have the weight's shape {tuple(weight.shape)}")
        self.tasks, self.importance, self.centre = state["tasks"], state["importance"], state["centre"]
        self.scatter, self._scatter = state["scatter"].cpu(), None

    def memory_bytes(self) -> dict[str, int]:
        """The memory of F and c, which does not grow with the number of tasks.

        Returns:
            Bytes by kind.
        """
        return {
            "importances": sum(part.nbytes for part in self.importance.values()),
            "weights": sum(part.nbytes for part in self.centre.values()),
        }


_PRESETS = {
    "pmnist": {"lr": 0.01, "strength": 100.0, "samples": 10},
    "pmnist-60k": {"lr": 0.01, "strength": 100.0, "samples": 10},
    "cifar100-split": {"lr": 0.005, "strength": 5000.0, "samples": 64},
    "cifar100-superclass": {"lr": 0.03, "strength": 1000.0, "samples": 64},
    "tiny-imagenet": {"lr": 0.01, "strength": 1000.0, "samples": 64},  # ours: none is published
}
register_method("ewc", EWC, "Elastic weight consolidation: a penalty for moving important weights.", presets=_PRESETS)
