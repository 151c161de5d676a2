"""How well a model does on one task's test data: accuracy within the task's head, or a metric of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from steppe.data.task import Task
from steppe.errors import DivergedError, SteppeError, UsageError, one_line, short_repr
from steppe.network.heads import is_class_numbers, within_head
from steppe.network.network import Network


@runtime_checkable
class UpdatingMetric(Protocol):
    """A metric that sees batch after batch before it is computed, such as those of torchmetrics."""

    def reset(self) -> None:
        """Forget all batches."""
        ...

    def update(self, output: Tensor, target: Any, /) -> object:
        """See a batch."""
        ...

    def compute(self) -> Any:
        """Return the metric over all batches since the last reset."""
        ...


Metric = Callable[[Tensor, Any], Any] | UpdatingMetric
"""A function of output and target that returns the mean over the samples, or an object that sees batch after batch."""


class Score(Protocol):
    """Sees a task's test data batch by batch."""

    def add(self, scores: Tensor, target: Tensor) -> None:
        """See a batch: what prediction compares, usually the model's output, and the targets."""
        ...

    def result(self) -> float:
        """Return the task's result."""
        ...


class Best:
    """The highest score of each sample, and the class it belongs to; NaN counts as the highest."""

    def __init__(self, scores: Tensor, head: range | None) -> None:
        if head is None:
            self.values, self.places = scores.max(1)  # what argmax gives, in a seventh of the time
        else:
            self.values, places = scores[:, head.start : head.stop].max(1)
            self.places = places + head.start


class Accuracy:
    """The share of correct predictions, in percent; the count stays on the device until it is needed."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._highest: list[Tensor] = []
        self._total = 0

    def add(self, scores: Tensor, target: Tensor) -> None:
        """Count a batch."""
        best = Best(scores, self._task.head)
        self._right += (best.places == target).sum()
        self._total += len(target)
        if len(target):
            self._highest.append(best.values.max())  # NaN if any is

    def result(self) -> float:
        """Return the accuracy.

        Raises:
            DivergedError: An output is NaN.
        """
        if self._highest and bool(torch.stack(self._highest).isnan().any()):
            raise DivergedError(
                f"{self._task.name}: the model's output on some of the test data is NaN; check the data and "
                "`input_transform`, or lower the learning rate (lr, ascent_lr) and learn again."
            )
        return 100.0 * int(self._right) / self._total


class UserScore:
    """A metric of the user's on one task, within its head.

    A function is called with each batch, and its results are averaged, weighted by the batches' samples. An object with
    `reset`, `update` and `compute` is reset first, and computed once at the end.
    """

    def __init__(self, metric: Metric, task: Task) -> None:
        self._metric, self._task = metric, task
        self._total, self._count = 0.0, 0
        if isinstance(metric, UpdatingMetric):
            self._called(metric.reset)

    def add(self, scores: Tensor, target: Tensor) -> None:
        """See a batch."""
        if self._task.head is not None and scores.ndim != 2:
            raise UsageError(
                f"{self._task.name}: a head needs one row of outputs per sample, got {tuple(scores.shape)}."
            )
        output, target = within_head(scores, target, self._task.head)
        if isinstance(self._metric, UpdatingMetric):
            self._called(self._metric.update, output, target)
        else:
            self._total += self._number(self._called(self._metric, output, target)) * len(scores)
            self._count += len(scores)

    def result(self) -> float:
        """Return the metric.

        Raises:
            UsageError: It fails, or is not a finite number.
        """
        if isinstance(self._metric, UpdatingMetric):
            return self._number(self._called(self._metric.compute))
        return self._total / self._count

    def _called(self, function: Callable[..., Any], *given: Any) -> Any:
        try:
            return function(*given)
        except (SteppeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UsageError(
                f"{self._task.name}: `metric` failed: {type(error).__name__}: {one_line(error)}"
            ) from error

    def _number(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{self._task.name}: `metric` must return one number, got {short_repr(value)}.") from error
        if not math.isfinite(number):
            raise UsageError(
                f"{self._task.name}: `metric` returned {number}; it must be defined for every batch, or be an object "
                "with `reset`, `update` and `compute`, which sees all batches first."
            )
        return number


def start_score(metric: Metric | None, task: Task, network: Network) -> Score:
    """Return what collects a task's result."""
    return Accuracy(task, network.device) if metric is None else UserScore(metric, task)


def check_accuracy_defined(task: Task, scores: Tensor, target: Tensor) -> None:
    """Raise UsageError unless outputs are rows of logits and targets are class numbers."""
    if scores.ndim == 2 and is_class_numbers(target):
        return
    raise UsageError(
        f"{task.name}: accuracy needs one row of logits per sample and class numbers, got an output of shape "
        f"{tuple(scores.shape)} and targets of shape {tuple(target.shape)} and type {target.dtype}; create the learner "
        "with metric=..., a function of output and target."
    )


def check_metric(metric: object) -> None:
    """Raise UsageError for something that cannot be a metric."""
    if metric is None or (not isinstance(metric, type) and (isinstance(metric, UpdatingMetric) or callable(metric))):
        return
    if isinstance(metric, type):
        raise UsageError(f"metric is the class {metric.__name__}; pass an instance, metric={metric.__name__}(...).")
    raise UsageError(
        "metric must be a function of output and target, or an object with `reset`, `update` and `compute`, got "
        f"{short_repr(metric)}."
    )
