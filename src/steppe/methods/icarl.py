"""iCaRL (Rebuffi et al., CVPR 2017) for tasks with heads of their own: exemplars, distillation, nearest class mean.

z(x) is the whole vector of logits. While learning task t, with z* the logits stored for each exemplar and one exemplar
drawn per old class:

    loss = CE(z on t's head) + γ Σ_{τ<t} (1/c_τ) Σ_{classes of τ} KL(softmax z*[τ] ‖ softmax z[τ])

At the task's end each of its classes chooses exemplars by herding: the e-th is the sample, not yet chosen, that brings
the mean of the chosen z nearest to the class mean. A class keeps the first m = ⌊K / classes seen⌋, and all z* are
taken anew. A sample is predicted as the class of its task whose exemplars' mean z is nearest to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from steppe.checkpoint.tree import State
from steppe.data.task import Task
from steppe.errors import ModelError, UsageError
from steppe.methods.base import Method, MethodConfig
from steppe.methods.parts.sgd import MomentumSGD, clipped
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import register_method
from steppe.runtime.rng import Streams
from steppe.runtime.session import yield_point
from steppe.settings import setting
from steppe.tensors.batch import Batch, index_of

_CHUNK = 256  # samples of a forward that only collects logits


@dataclass(frozen=True)
class ICaRL(MethodConfig):
    """Settings of iCaRL."""

    lr: float = setting(0.01, "step size of SGD", above=0)
    momentum: float = setting(0.9, "momentum of SGD", at_least=0, below=1)
    clip: float = setting(2.0, "norm to which the gradient is clipped; 0: never", at_least=0)
    exemplars: int = setting(1000, "samples kept over all classes (K)", at_least=1)
    distillation: float = setting(0.5, "weight of the old classes' distillation (γ)", at_least=0)

    def validate(self, task: Task, heads: Sequence[range | None]) -> None:
        """Every task needs classes of its own, and every class at least one exemplar."""
        if task.head is None:
            raise UsageError(
                f"{task.name}: iCaRL keeps exemplars of each class and so needs tasks with classes of their own, but "
                "this one shares the single head: give the tasks heads (head=range(...)), or use another method."
            )
        earlier = [head for head in heads if head is not None]
        if any(task.head.start < head.stop and head.start < task.head.stop for head in earlier):
            raise UsageError(
                f"{task.name}: iCaRL needs tasks with classes of their own, but the head {task.head} shares rows with "
                "an earlier task's: give each task its own rows, or use another method."
            )
        classes = sum(len(head) for head in earlier) + len(task.head)
        if self.exemplars < classes:
            raise UsageError(
                f"{task.name}: exemplars = {self.exemplars} leaves nothing for some of the {classes} classes seen with "
                "this task: raise it to one per class at least."
            )

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """ICaRL at work."""
        if network.min_batch > 1:
            raise ModelError(
                "iCaRL compares samples with the means of classes, and a BatchNorm of the model keeps no running "
                "statistics, so that what it says of a sample depends on the others in a batch: let it keep them "
                "(track_running_stats=True), or choose another method."
            )
        return _ICaRL(self, network, streams)


@dataclass(frozen=True)
class Exemplars:
    """Samples of the old classes, class by class in order of choice, with the logits stored for them."""

    batch: Batch
    logits: Tensor  # (samples, outputs)
    places: dict[int, range]  # class -> where its samples are

    @property
    def fit(self) -> bool:
        """Whether every sample has its logits, and every class samples and a place among the logits."""
        return (
            self.logits.ndim == 2
            and len(self.logits) == len(self.batch)
            and len(self.places) > 0
            and all(type(label) is int and 0 <= label < self.logits.shape[1] for label in self.places)
            and all(0 <= places.start < places.stop <= len(self.batch) for places in self.places.values())
        )

    def class_means(self) -> Tensor:
        """Mean logits of the exemplars of every class that has some, (classes, outputs), in the order of `places`."""
        return torch.stack([self.logits[places.start : places.stop].mean(0) for places in self.places.values()])


class _ICaRL(Method):
    descent: MomentumSGD
    state_attrs = ("descent",)

    def __init__(self, settings: ICaRL, network: Network, streams: Streams) -> None:
        self.settings, self.network = settings, network
        self.descent = MomentumSGD(network, settings.lr, settings.momentum)
        self.exemplars: Exemplars | None = None
        self._picker = streams.python_rng("exemplar draws")
        self._pool: list[Batch] = []  # the samples of the task's first epoch
        self._means: Tensor | None = None

    def begin_task(self) -> None:
        super().begin_task()
        self._pool = []
        self.uses_bare_batch = self.exemplars is None  # else there is one of every old class beside the batch

    def observe(self, batch: Batch) -> Tensor:
        drawn, stored = self._one_of_each()
        union = self.network.prepare(batch.joined(drawn))
        output = self.network.forward(union.x)  # the update's one forward
        loss = self._current_loss(output[: len(batch)], union[: len(batch)])
        if stored is not None:
            loss = loss + self.settings.distillation * self._distance(output[len(batch) :], stored)
        self.descent.step(clipped(self.network.gradient_of(loss), self.settings.clip))
        return loss.detach()

    def _one_of_each(self) -> tuple[Batch | None, Tensor | None]:
        """A random exemplar of every old class, and its stored logits."""
        if self.exemplars is None:
            return None, None
        held = self.exemplars.batch.y.device
        picked = index_of((self._picker.choice(places) for places in self.exemplars.places.values()), held)
        return self.exemplars.batch[picked], self.exemplars.logits[picked.to(self.network.device, non_blocking=True)]

    def _current_loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of each sample on its task's head."""
        return cross_entropy(self.network.mask_logits(output, batch.task), batch.y)

    def _distance(self, output: Tensor, stored: Tensor) -> Tensor:
        """Σ_τ (1/c_τ) Σ KL(softmax z*[τ] ‖ softmax z[τ]), one exemplar of each class, on its own task's head."""
        total = output.new_zeros(())
        for head in filter(None, self.network.heads):
            own = [row for row, label in enumerate(self.exemplars.places if self.exemplars else ()) if label in head]
            if not own:
                continue
            rows = index_of(own, output.device)
            target = log_softmax(stored[rows, head.start : head.stop], 1)
            found = log_softmax(output[rows, head.start : head.stop], 1)
            total = total + (target.exp() * (target - found)).sum() / len(head)
        return total

    def after_batch(self, batch: Batch) -> None:
        if self._pool:
            batch.require_like(self._pool[0])  # now, rather than when they are put together at the task's end
        self._pool.append(batch)

    def end_task(self) -> list[str]:
        """Choose the new classes' exemplars, shorten the old classes', and take all stored logits anew."""
        quota = self.settings.exemplars // sum(len(head) for head in self.network.heads if head is not None)
        kept: dict[int, Batch] = {}
        if self.exemplars is not None:
            for label, places in self.exemplars.places.items():
                kept[label] = self.exemplars.batch[places.start : min(places.stop, places.start + quota)]
        if self._pool:
            pool = Batch.union(self._pool)
            self._pool = [pool]  # kept to the end, should that be broken off
            logits = self._logits(pool)
            for label in sorted(set(pool.y.tolist())):
                yield_point()
                rows = (pool.y == label).nonzero().squeeze(1)
                chosen = herded(logits[rows.to(logits.device)], quota).to(rows.device)
                kept[label] = pool[rows[chosen]]
        exemplars = self._stored(kept) if kept else None
        means = None if exemplars is None else exemplars.class_means()
        self.exemplars, self._means, self._pool = exemplars, means, []
        return []

    def _stored(self, kept: Mapping[int, Batch]) -> Exemplars:
        places: dict[int, range] = {}
        start = 0
        for label, batch in kept.items():
            places[label] = range(start, start + len(batch))
            start += len(batch)
        whole = Batch.union(list(kept.values()))
        return Exemplars(whole, self._logits(whole), places)

    def _logits(self, batch: Batch) -> Tensor:
        """The whole output on stored samples, in eval mode."""
        with torch.no_grad(), self.network.mode(training=False):
            parts = []
            for x in torch.split(batch.x, _CHUNK):
                yield_point()
                parts.append(self.network.input_copies.call(self.network.prepare_inputs(x)))
        return torch.cat(parts)

    def scores(self, x: Tensor) -> Tensor:
        """Minus the distance to each class's mean; −inf for a class without exemplars."""
        logits = self.network.input_copies.call(x)
        scores = torch.full_like(logits, -torch.inf)
        if self.exemplars is not None and self._means is not None:
            distances = torch.cdist(logits, self._means, compute_mode="donot_use_mm_for_euclid_dist")
            held = index_of(self.exemplars.places, logits.device)
            scores[:, held] = distances.neg().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return scores

    def state_dict(self) -> State:
        held = self.exemplars
        return {
            **super().state_dict(),
            "exemplars": None if held is None else [held.batch, held.logits, held.places],
            "pool": Batch.union(self._pool) if self._pool else None,
        }

    def load_state_dict(self, state: State) -> None:
        exemplars, pool = state["exemplars"], state["pool"]
        super().load_state_dict({key: value for key, value in state.items() if key not in ("exemplars", "pool")})
        self.exemplars = None if exemplars is None else Exemplars(*exemplars)
        if self.exemplars is not None and not self.exemplars.fit:
            raise ValueError("the exemplars and their logits do not fit")
        self._means = None if self.exemplars is None else self.exemplars.class_means()
        self._pool = [] if pool is None else [pool]

    def memory_bytes(self) -> dict[str, int]:
        if self.exemplars is None:
            return {"replay": 0, "bases": 0, "logits": 0}
        batch = self.exemplars.batch
        replay = batch.x.nbytes + batch.y.nbytes + batch.task.nbytes
        return {"replay": replay, "bases": 0, "logits": self.exemplars.logits.nbytes}


def herded(features: Tensor, count: int) -> Tensor:
    """The places of up to `count` rows of features, (n, d), in order: each the unused row that brings the mean of the
    chosen ones nearest to the mean of all.
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
    "Exemplars by herding, distillation of old logits, nearest class mean; for tasks with heads of their own.",
    presets={
        "cifar100-split": {"lr": 0.03, "distillation": 0.1, "exemplars": 1000},
        "cifar100-superclass": {"lr": 0.01, "distillation": 0.5, "exemplars": 1000},
        "tiny-imagenet": {"lr": 0.01, "distillation": 1.0, "exemplars": 400},
    },
)
