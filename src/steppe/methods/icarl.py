"""iCaRL (Rebuffi et al., CVPR 2017) for multi-head tasks: exemplars, distillation, nearest class mean.

z(x) is the full vector of logits. While learning task t, with z* the logits stored for each exemplar and one exemplar
drawn per old class:

    loss = CE(z on t's head) + γ Σ_{τ<t} (1/c_τ) Σ_{classes of τ} KL(softmax z*[τ] ‖ softmax z[τ])

At the end of the task, exemplars of each of its classes are selected by herding: the e-th is the unused sample that
brings the mean z of the selected ones closest to the class mean. Every class keeps its first m = ⌊K / classes seen⌋
exemplars, and all z* are recomputed. A sample is predicted as the class, among those of its task, whose exemplars' mean
z is closest to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from steppe.checkpoint.tree import State
from steppe.data.task import Task
from steppe.errors import ModelError, UsageError
from steppe.methods.base import Method
from steppe.methods.parts.sgd import clip_by_norm
from steppe.methods.parts.sgd_method import SGDConfig, SGDMethod
from steppe.network.eval_batches import min_eval_batch
from steppe.network.growing_head import GrowingHead
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.runtime.session import yield_point
from steppe.settings import setting
from steppe.tensors.batch import Batch, index_of
from steppe.tensors.nest import Nest, split_nest

_CHUNK = 256  # samples per forward when collecting logits


@dataclass(frozen=True)
class ICaRL(SGDConfig):
    """Settings of iCaRL."""

    needs_tasks = True
    takes_any_loss = False  # it keeps exemplars per class, and distills logits

    exemplars: int = setting(1000, "number of exemplars over all classes (K)", at_least=1)
    distillation: float = setting(0.5, "weight of the distillation of old classes (γ)", at_least=0)

    def validate(self, task: Task, heads: Sequence[range | None]) -> None:
        """Reject a task without its own classes, or with more classes than exemplars.

        Args:
            task: The task about to be learned.
            heads: The heads of the tasks learned so far.

        Raises:
            UsageError: If iCaRL cannot learn the task.
        """
        if task.head is None:
            raise UsageError(
                f"{task.name}: iCaRL keeps exemplars per class, so each task needs its own classes, but this one "
                "shares the single head: give the tasks heads (head=range(...)), or use another method."
            )
        earlier = [head for head in heads if head is not None]
        if any(task.head.start < head.stop and head.start < task.head.stop for head in earlier):
            raise UsageError(
                f"{task.name}: iCaRL needs each task to have its own classes, but the head {task.head} overlaps an "
                "earlier task's: give each task its own outputs, or use another method."
            )
        classes = sum(len(head) for head in earlier) + len(task.head)
        if self.exemplars < classes:
            raise UsageError(
                f"{task.name}: exemplars = {self.exemplars} is too few for the {classes} classes seen with this task: "
                "raise it to at least one per class."
            )

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        if min_eval_batch(network.model) > 1:
            raise ModelError(
                "iCaRL compares single samples with class means, but a BatchNorm of the model keeps no running "
                "statistics, so a sample's logits depend on the rest of its batch: set track_running_stats=True, or "
                "use another method."
            )
        return _ICaRL(self, network, streams)


@dataclass(frozen=True)
class Exemplars:
    """Exemplars of all classes, class by class in the order of selection, with their stored logits."""

    batch: Batch
    logits: Tensor  # (samples, outputs)
    rows: dict[int, range]  # class -> the rows of its samples

    @property
    def is_consistent(self) -> bool:
        """Whether every sample has logits, and every class has samples and an output."""
        return (
            self.logits.ndim == 2
            and len(self.logits) == len(self.batch)
            and len(self.rows) > 0
            and all(type(label) is int and 0 <= label < self.logits.shape[1] for label in self.rows)
            and all(0 <= rows.start < rows.stop <= len(self.batch) for rows in self.rows.values())
        )

    def class_means(self) -> Tensor:
        """The mean logits of each class's exemplars, (classes, outputs), in the order of `rows`."""
        return torch.stack([self.logits[rows.start : rows.stop].mean(0) for rows in self.rows.values()])


class _ICaRL(SGDMethod[ICaRL]):
    def __init__(self, settings: ICaRL, network: Network, streams: Streams) -> None:
        super().__init__(settings, network)
        self.exemplars: Exemplars | None = None
        self._picker = streams.python_rng("exemplar draws")
        self._pool: list[Batch] = []  # the samples of the task's first epoch
        self._means: Tensor | None = None

    def begin_task(self) -> None:
        super().begin_task()
        self._pool = []
        self.uses_bare_batch = self.exemplars is None  # else exemplars of the old classes are joined to it

    def grow_head(self, head: GrowingHead) -> None:
        """Complete the stored logits by the new outputs'."""
        super().grow_head(head)
        held = self.exemplars
        if held is None or held.logits.shape[1] == head.rows:
            return
        known = held.logits.shape[1]
        logits = torch.cat([held.logits, self._logits(held.batch)[:, known:].to(held.logits)], 1)
        exemplars = replace(held, logits=logits)
        self.exemplars, self._means = exemplars, exemplars.class_means()

    def observe(self, batch: Batch) -> Tensor:
        exemplars, stored = self._sample_exemplars()  # stored: their z*
        union = self.network.prepare(batch.joined(exemplars))
        output = self.network.forward(union.x)  # a single forward, so that running statistics are updated once
        loss = self._current_loss(output[: len(batch)], union[: len(batch)])
        if stored is not None:
            loss = loss + self.settings.distillation * self._distillation_loss(output[len(batch) :], stored)
        self.descent.step(clip_by_norm(self.network.gradient_of(loss), self.settings.clip))
        return loss.detach()

    def _sample_exemplars(self) -> tuple[Batch | None, Tensor | None]:
        """A random exemplar of each old class, with their stored logits."""
        if self.exemplars is None:
            return None, None
        picks = (self._picker.choice(rows) for rows in self.exemplars.rows.values())
        index = index_of(picks, self.exemplars.batch.y.device)
        return self.exemplars.batch[index], self.exemplars.logits[index.to(self.network.device, non_blocking=True)]

    def _current_loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy of the samples on their task's head."""
        return cross_entropy(self.network.heads.mask(output, batch.task), batch.y)

    def _distillation_loss(self, output: Tensor, stored: Tensor) -> Tensor:
        """Σ_τ (1/c_τ) Σ KL(softmax z*[τ] ‖ softmax z[τ]), over one exemplar per class, each on its own task's head."""
        total = output.new_zeros(())
        for head in filter(None, self.network.heads.ranges):
            own = [row for row, label in enumerate(self.exemplars.rows if self.exemplars else ()) if label in head]
            if not own:
                continue
            rows = index_of(own, output.device)
            target = log_softmax(stored[rows, head.start : head.stop], 1)
            current = log_softmax(output[rows, head.start : head.stop], 1)
            total = total + (target.exp() * (target - current)).sum() / len(head)
        return total

    def after_batch(self, batch: Batch) -> None:
        if self._pool:
            batch.require_like(self._pool[0])  # fail now, not when they are joined at the end of the task
        self._pool.append(batch)

    def end_task(self) -> list[str]:
        """Select the new classes' exemplars, truncate the old classes', and recompute all stored logits."""
        quota = self.settings.exemplars // sum(len(head) for head in self.network.heads.ranges if head is not None)
        kept: dict[int, Batch] = {}
        if self.exemplars is not None:
            for label, rows in self.exemplars.rows.items():
                kept[label] = self.exemplars.batch[rows.start : min(rows.stop, rows.start + quota)]
        if self._pool:
            pool = Batch.union(self._pool)
            self._pool = [pool]  # keep the pool until the end, in case this is interrupted
            logits = self._logits(pool)
            for label in sorted(set(pool.y.tolist())):
                yield_point()
                rows = (pool.y == label).nonzero().squeeze(1)
                chosen = herd(logits[rows.to(logits.device)], quota).to(rows.device)
                kept[label] = pool[rows[chosen]]
        exemplars = self._store(kept) if kept else None
        means = None if exemplars is None else exemplars.class_means()
        self.exemplars, self._means, self._pool = exemplars, means, []
        return []

    def _store(self, kept: Mapping[int, Batch]) -> Exemplars:
        rows: dict[int, range] = {}
        start = 0
        for label, batch in kept.items():
            rows[label] = range(start, start + len(batch))
            start += len(batch)
        whole = Batch.union(list(kept.values()))
        return Exemplars(whole, self._logits(whole), rows)

    def _logits(self, batch: Batch) -> Tensor:
        """The full output on stored samples, in eval mode."""
        with torch.no_grad(), self.network.mode(training=False):
            parts = []
            for x in split_nest(batch.x, _CHUNK):
                yield_point()
                parts.append(self.network.input_copies.call(self.network.prepare_inputs(x)))
        return torch.cat(parts)

    def scores(self, x: Nest) -> Tensor:
        """Minus the distance to each class mean, or −inf for a class without exemplars."""
        logits = self.network.input_copies.call(x)
        scores = torch.full_like(logits, -torch.inf)
        if self.exemplars is not None and self._means is not None:
            distances = torch.cdist(logits, self._means, compute_mode="donot_use_mm_for_euclid_dist")
            held = index_of(self.exemplars.rows, logits.device)
            scores[:, held] = distances.neg().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return scores

    def state_dict(self) -> State:
        held = self.exemplars
        return {
            **super().state_dict(),
            "exemplars": None if held is None else [held.batch, held.logits, held.rows],
            "pool": Batch.union(self._pool) if self._pool else None,
        }

    def load_state_dict(self, state: State) -> None:
        exemplars, pool = state["exemplars"], state["pool"]
        super().load_state_dict({key: value for key, value in state.items() if key not in ("exemplars", "pool")})
        self.exemplars = None if exemplars is None else Exemplars(*exemplars)
        if self.exemplars is not None and not self.exemplars.is_consistent:
            raise ValueError("the exemplars do not match their logits and classes")
        self._means = None if self.exemplars is None else self.exemplars.class_means()
        self._pool = [] if pool is None else [pool]

    def memory_bytes(self) -> dict[str, int]:
        if self.exemplars is None:
            return {"replay": 0, "bases": 0, "logits": 0}
        batch = self.exemplars.batch
        return {"replay": batch.nbytes, "bases": 0, "logits": self.exemplars.logits.nbytes}


def herd(features: Tensor, count: int) -> Tensor:
    """Select samples by herding: always the one that brings the mean of those selected closest to the mean of all.

    Args:
        features: One row per sample, (n, d).
        count: The maximum number of samples to select.

    Returns:
        Row indices in the order of selection.

    Example:
        >>> import torch
        >>> from steppe.methods.icarl import herd
        >>> herd(torch.tensor([[0.0], [1.0], [4.0], [7.0]]), 2)  # the mean is 3; {4, 1} has mean 2.5
        tensor([2, 1])
    """
    mean = features.mean(0)
    total = torch.zeros_like(mean)
    free = torch.zeros(len(features), dtype=features.dtype, device=features.device)
    chosen: list[Tensor] = []
    for size in range(1, min(count, len(features)) + 1):
        gap = torch.linalg.vector_norm(mean - (features + total) / size, dim=1)
        best = (gap + free).argmin()
        free[best] = torch.inf
        total = total + features[best]
        chosen.append(best)
    return torch.stack(chosen)


register_method(
    "icarl",
    ICaRL,
    "Exemplars by herding, distillation of old logits, nearest class mean; multi-head only.",
    presets={
        "cifar100-split": {"lr": 0.03, "distillation": 0.1, "exemplars": 1000},
        "cifar100-superclass": {"lr": 0.01, "distillation": 0.5, "exemplars": 1000},
        "tiny-imagenet": {"lr": 0.01, "distillation": 1.0, "exemplars": 400},
    },
)
