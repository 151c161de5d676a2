"""The training loop of one task: epochs, updates on each batch, validation, and a check that losses are finite."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.errors import DataError, DivergedError
from steppe.learning.events import Callback, EpochEnded, Progress
from steppe.learning.task_group import TaskGroup
from steppe.methods.base import Method
from steppe.methods.parts.single_sample_checks import is_batch_norm_size_error, single_sample_error
from steppe.network.network import Network
from steppe.runtime.clocks import Elapsed, Stopwatch
from steppe.runtime.rng import Streams
from steppe.runtime.session import yield_point
from steppe.runtime.signals import signals_unblocked
from steppe.settings import TrainingConfig
from steppe.tensors.batch import Batch

_REPORT_EVERY = 0.2  # seconds between reports: each waits for the device


@dataclass(frozen=True)
class TaskResult:
    """What learning a task took.

    Attributes:
        updates: How many updates were made.
        seconds: Wall-clock seconds by kind: "train" for updates, "memory" for the end of the task.
        bytes: Memory that the method holds, by kind.
        working: The kinds of it that need not be kept, as they can be rebuilt from the others and the weights.
        remarks: What the user should know, such as a weight that can no longer learn.
        diagnostics: What the method records, such as the ranks of its bases.
        cpu_seconds: CPU seconds by kind; empty if the task was resumed from a file that does not hold them.
    """

    updates: int
    seconds: dict[str, float]
    bytes: dict[str, int]
    remarks: list[str] = field(default_factory=list)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    working: tuple[str, ...] = ()


class TrainingLoop:
    """Trains a method on one task, or on several together.

    Its state can be saved between any two batches, which is when `callback` is called; resumed from it, training gives
    the same bits. With `patience` the weights and buffers of the epoch with the lowest validation loss are kept.
    """

    def __init__(
        self,
        method: Method,
        network: Network,
        group: TaskGroup,
        outputs: int | None,
        training: TrainingConfig,
        streams: Streams,
        callback: Callback,
    ) -> None:
        self._method, self._network, self._group, self._training = method, network, group, training
        self._outputs, self._streams, self._callback = outputs, streams, callback
        self._place = group.first + len(group.tasks) - 1
        self._validation = Validation(method, network, group, outputs, training) if training.patience else None
        self.updates = 0
        self._epoch = self._batch = 0  # the epoch, and how many batches of it are done
        self._over = False
        self._losses = Losses(group.name, 0, 0)
        self._streams_before: State = None  # as they were when the epoch began
        self._clock, self._seconds_before = Stopwatch(), 0.0

    @property
    def name(self) -> str:
        """The name of the task."""
        return self._group.name

    @property
    def time(self) -> Elapsed:
        """The time it has taken, without interruptions."""
        return self._clock.elapsed

    @property
    def best(self) -> Mapping[str, Tensor]:
        """The best weights and buffers so far; empty without validation."""
        return {} if self._validation is None else self._validation.best

    def run(self) -> None:
        """Train until the task is done."""
        while not self._over:
            self._one_epoch()
        if self._validation is not None:
            self._validation.restore_best()
            self._method.weights_restored()

    def _one_epoch(self) -> None:
        training, group, losses = self._training, self._group, self._losses
        count = group.count_batches(training.batch_size)
        reported = time.perf_counter()
        batches = self._rest_of_epoch()
        while (batch := _fetch(batches)) is not None:
            for _ in range(training.updates_per_batch):
                losses.add(observe(self._method, batch, group.name, losses.place))
            if self._epoch == 0:
                self._method.after_batch(batch)
            self.updates += training.updates_per_batch
            self._batch += 1
            yield_point(learner=True)
            now = time.perf_counter()
            if now - reported > _REPORT_EVERY:
                reported = now
                self._callback(Progress(self._place, self._epoch, training.epochs, self._batch, count, losses.settle()))
        if self._batch == 0:
            again = "; an IterableDataset must start anew each time it is iterated" if self._epoch else ""
            raise DataError(
                f"{group.name}: the training data yields no batch in epoch {self._epoch + 1}{again} (drop_last with "
                "too few samples?)."
            )
        losses.settle()
        goes_on = self._validation is None or self._validation.should_continue()
        self._over = not goes_on or self._epoch + 1 == training.epochs
        now = self.time.wall
        seconds, self._seconds_before = now - self._seconds_before, now
        done = self._batch
        self._epoch, self._batch = self._epoch + 1, 0
        self._losses = Losses(group.name, self._epoch, self.updates)
        judged = (None, None) if self._validation is None else (self._validation.loss, self._validation.lr)
        ended = (
            self._place,
            group.name,
            self._epoch - 1,
            count or done,
            losses.mean,
            self.updates,
            seconds,
        )
        self._callback(EpochEnded(*ended, *judged))

    def _rest_of_epoch(self) -> Iterator[Batch]:
        """The epoch's remaining batches, in the order drawn when it began; all other streams stay where they are."""
        now = self._streams.state_dict()
        if self._batch:
            self._streams.load_state_dict(self._streams_before)
        else:
            self._streams_before = now
        size, skip = self._training.batch_size, self._batch
        batches = self._group.batches(size, self._streams, self._outputs, self._network, skip)
        if self._batch:
            self._streams.load_state_dict(now)
        return batches

    def state_dict(self) -> State:
        """Return the progress."""
        self._losses.settle()
        spent = self.time
        return {
            "task": self._group.name,
            "tasks": self._group.described,
            "training": self._training.as_dict(),
            "epoch": self._epoch,
            "batch": self._batch,
            "updates": self.updates,
            "over": self._over,
            "losses": self._losses.state_dict(),
            "streams_before": self._streams_before,
            "validation": None if self._validation is None else self._validation.state_dict(),
            "seconds": [spent.wall, self._seconds_before],
            "cpu_seconds": spent.cpu,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the progress of the same task and training."""
        self._epoch, self._batch, self.updates, self._over = (
            state[name] for name in ("epoch", "batch", "updates", "over")
        )
        self._losses = Losses(self._group.name, self._epoch, self.updates)
        self._losses.load_state_dict(state["losses"])
        self._streams_before = state["streams_before"]
        if self._validation is not None:
            self._validation.load_state_dict(state["validation"])
        before, self._seconds_before = state["seconds"]
        self._clock = Stopwatch(Elapsed(before, state.get("cpu_seconds")))  # older states have no such entry


class Validation:
    """Decides after each epoch which weights are the best, when to lower the learning rates, and when to stop.

    After `patience` epochs in a row without a strictly lower validation loss the learning rates are divided; if that
    makes them less than `lr_min`, the task is over. Training always continues from the current weights.
    """

    def __init__(
        self, method: Method, network: Network, group: TaskGroup, outputs: int | None, training: TrainingConfig
    ) -> None:
        group.require_validation()
        self._outputs = outputs
        self.loss = math.nan
        self.lr: float | None = None
        self.lr_decays = 0
        self._method, self._network, self._group, self._training = method, network, group, training
        self._lowest = math.inf
        self.best: dict[str, Tensor] = {}  # the weights and buffers of the lowest loss
        self._left = training.patience

    def should_continue(self) -> bool:
        """Validate after an epoch; False when the task is over."""
        with self._method.prediction_weights():
            return self._judge()

    def _judge(self) -> bool:
        self.loss = self._group.validation_loss(self._network, self._outputs)
        if not math.isfinite(self.loss):
            raise DivergedError(
                f"the validation loss of {self._group.name!r} became {self.loss}; lower the learning rate "
                "(lr, ascent_lr) or check the data."
            )
        if self.loss < self._lowest:
            self._lowest, self.best = self.loss, self._network.snapshot()
            self._left = self._training.patience
            return True
        self._left -= 1
        if self._left > 0:
            return True
        self.lr = self._method.decay_lr(self._training.lr_divisor)
        self.lr_decays += 1
        self._left = self._training.patience
        return self.lr >= self._training.lr_min

    def restore_best(self) -> None:
        """Restore the best weights and buffers."""
        self._network.restore(self.best)

    def state_dict(self) -> State:
        """Return what has been decided so far."""
        return {
            "best": self._lowest,
            "best_state": self.best,
            "left": self._left,
            "lr": self.lr,
            "cuts": self.lr_decays,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the decisions; the learner restores the method's learning rates."""
        self._lowest, self.best = state["best"], state["best_state"]
        self._left, self.lr, self.lr_decays = state["left"], state["lr"], state["cuts"]


def _fetch(batches: Iterator[Batch]) -> Batch | None:
    """The next batch. Reading it may run user code, so signals are handled immediately."""
    with signals_unblocked():
        return next(batches, None)


def observe(method: Method, batch: Batch, name: str, place: str) -> Tensor:
    """Make one update; errors name the task, or the place in it."""
    try:
        return method.observe(batch)
    except DivergedError as error:
        raise DivergedError(f"{place}: {error}") from error
    except ValueError as error:
        if not is_batch_norm_size_error(error):
            raise
        raise single_sample_error(name) from error


class Losses:
    """The losses of an epoch, left on their device until they are needed."""

    def __init__(self, name: str, epoch: int, updates_before: int) -> None:
        self._name, self._epoch, self._before = name, epoch, updates_before
        self._pending: list[Tensor] = []
        self._seen: list[float] = []
        self._latest = 0  # how many were new at the last `settle`

    @property
    def place(self) -> str:
        """Task, epoch and number of the next update."""
        return self._named(len(self._seen) + len(self._pending))

    def _named(self, number: int) -> str:
        return f"task {self._name!r}, epoch {self._epoch + 1}, update {self._before + number + 1}"

    def add(self, loss: Tensor) -> None:
        """Add the loss of an update."""
        self._pending.append(loss)

    def settle(self) -> float:
        """Read the pending losses, check that they are finite, and return their mean."""
        if self._pending:
            values = torch.stack(self._pending).double().cpu().tolist()
            for number, value in enumerate(values, start=len(self._seen)):
                if not math.isfinite(value):
                    raise DivergedError(
                        f"the loss became {value} in {self._named(number)}; lower the learning rate (lr, ascent_lr) or "
                        "check the data."
                    )
            self._seen += values
            self._latest = len(self._pending)
            self._pending = []
        latest = self._seen[-self._latest :] or [0.0]
        return math.fsum(latest) / len(latest)

    @property
    def mean(self) -> float:
        """The mean over the epoch, however often `settle` was called."""
        return math.fsum(self._seen) / max(len(self._seen), 1)

    def state_dict(self) -> State:
        """Return the losses that were read."""
        return torch.tensor(self._seen, dtype=torch.float64, device="cpu")

    def load_state_dict(self, state: State) -> None:
        """Restore them."""
        self._seen = state.tolist()
        self._before -= len(self._seen)
