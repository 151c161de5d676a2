"""One task: epochs over its samples, glances at each batch, step sizes cut and the best weights kept by validation;
losses watched for anything that is not a number.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from steppe.curriculum import Curriculum
from steppe.errors import DataError, DivergedError
from steppe.events import EpochEnded, Progress, Watch
from steppe.methods.base import Method
from steppe.network import Network
from steppe.protocol import Training
from steppe.seeding import Streams
from steppe.types import Batch

_REPORT_EVERY = 0.2  # seconds between looks at the losses: each look waits for the device


def fit(
    method: Method,
    network: Network,
    curriculum: Curriculum,
    outputs: int,
    training: Training,
    streams: Streams,
    watch: Watch,
) -> int:
    """Teach the method one task, or several together; returns the number of updates.

    With `patience` the weights and buffers of the epoch with the lowest validation loss are those left in the end.
    """
    validation = Validation(method, network, curriculum, training) if training.patience else None
    updates = 0
    place = curriculum.first + len(curriculum.tasks) - 1
    batches = curriculum.count_batches(training.batch_size)
    for epoch in range(training.epochs):
        losses = _Losses(curriculum.name, epoch, updates)
        started = reported = time.perf_counter()
        stream = curriculum.batches(training.batch_size, streams, outputs, network.device)
        for number, batch in enumerate(stream, start=1):
            for _ in range(training.glances):
                losses.add(_observed(method, batch, curriculum.name, losses.place))
            if epoch == 0:
                method.remember(batch)
            updates += training.glances
            now = time.perf_counter()
            if now - reported > _REPORT_EVERY:
                reported = now
                watch(Progress(place, epoch, training.epochs, number, batches, losses.settle()))
        if updates == 0:
            raise DataError(f"{curriculum.name}: the training data gave no batch (a DataLoader that drops its last?).")
        losses.settle()
        goes_on = validation is None or validation.goes_on()
        seconds = time.perf_counter() - started
        judged = (None, None) if validation is None else (validation.loss, validation.lr)
        watch(EpochEnded(place, curriculum.name, epoch, batches, losses.mean, updates, seconds, *judged))
        if not goes_on:
            break
    if validation is not None:
        validation.restore_best()
    return updates


class Validation:
    """What validation decides after each epoch: which weights are the best, when to cut the step sizes, when to stop.

    A strictly lower validation loss is better. After `patience` epochs in a row that were not, the step sizes are
    divided; if that makes them less than `lr_min`, the task is over. Better or not, learning goes on from where it is.
    """

    def __init__(self, method: Method, network: Network, curriculum: Curriculum, training: Training) -> None:
        curriculum.require_validation()
        self.loss = math.nan
        self.lr: float | None = None
        self._method, self._network, self._curriculum, self._training = method, network, curriculum, training
        self._best = math.inf
        self._best_state: dict[str, Tensor] = {}
        self._left = training.patience

    def goes_on(self) -> bool:
        """Judge the epoch that has just ended; False when the task is over."""
        self.loss = self._curriculum.validation_loss(self._network)
        if not math.isfinite(self.loss):
            raise DivergedError(
                f"the validation loss of {self._curriculum.name!r} became {self.loss}: lower the step size "
                "(lr, ascent_lr) or check the data."
            )
        if self.loss < self._best:
            self._best, self._best_state = self.loss, self._network.snapshot()
            self._left = self._training.patience
            return True
        self._left -= 1
        if self._left > 0:
            return True
        self.lr = self._method.slow_down(self._training.lr_divisor)
        self._left = self._training.patience
        return self.lr >= self._training.lr_min

    def restore_best(self) -> None:
        """Return to the best weights and buffers."""
        self._network.restore(self._best_state)


def _observed(method: Method, batch: Batch, name: str, place: str) -> Tensor:
    try:
        return method.observe(batch)
    except DivergedError as error:
        raise DivergedError(f"{place}: {error}") from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise DataError(
            f"{name}: a batch of one sample is too small for the model's BatchNorm: choose a batch_size "
            "that leaves no single sample at the end (with ascent_form=chunked, none in a chunk either)."
        ) from error


class _Losses:
    """The losses of an epoch, left on their device until somebody looks."""

    def __init__(self, name: str, epoch: int, updates_before: int) -> None:
        self._name, self._epoch, self._done = name, epoch, updates_before
        self._pending: list[Tensor] = []
        self._sum, self._count, self._recent = 0.0, 0, 0.0

    @property
    def place(self) -> str:
        """Where the next loss belongs."""
        return f"task {self._name!r}, epoch {self._epoch + 1}, update {self._done + len(self._pending) + 1}"

    def add(self, loss: Tensor) -> None:
        self._pending.append(loss)

    def settle(self) -> float:
        """Read what has come in, refuse what is not finite, and give its mean."""
        if self._pending:
            values = torch.stack(self._pending).double().cpu()
            bad = (~torch.isfinite(values)).nonzero()
            if len(bad):
                update = self._done + int(bad[0]) + 1
                raise DivergedError(
                    f"the loss became {float(values[int(bad[0])])} in task {self._name!r}, epoch "
                    f"{self._epoch + 1}, update {update}: lower the step size (lr, ascent_lr) or check the data."
                )
            self._done += len(values)
            self._sum += float(values.sum())
            self._count += len(values)
            self._recent = float(values.mean())
            self._pending = []
        return self._recent

    @property
    def mean(self) -> float:
        return self._sum / max(self._count, 1)
