"""What trackers log of a run, and at which step; the files beside this one write it to TensorBoard, MLflow and W&B.

A step is a batch, counted over all tasks, or a sample of a stream without tasks. A run that was resumed repeats what
came after its last checkpoint; whatever a tracker holds already is not logged again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import ClassVar, Self

from steppe.errors import one_line
from steppe.learning.accuracy_matrix import AccuracyMatrix
from steppe.learning.events import EpochEnded, Event, MemoryUpdated, Progress, RunStarted, TaskEnded
from steppe.learning.loop import TaskResult
from steppe.runtime.warn import warn_user

Point = tuple[int, float]
"""A step and a value."""


class Tracker(ABC):
    """Takes the events of a run or of `Learner.learn`, and logs them as curves.

    If the tracker fails during the run, it warns once and logs nothing more; training continues.

    Args:
        lr: The learning rate that training starts with, to log it; events name one only after it was lowered.
    """

    title: ClassVar[str]
    """What it is called in messages."""

    def __init__(self, lr: float | None = None) -> None:
        self._lr = lr
        self._ends: list[int] = []
        self._task = -1
        self._start = self._step = 0
        self._epoch = (0, 0)  # the number of an epoch, and the step at which it begins
        self._rows: dict[int, list[float]] = {}
        self._points: dict[str, Point | None] = {}
        self._has_failed = False

    @abstractmethod
    def _write(self, values: Mapping[str, float], step: int) -> None:
        """Write values of one step."""

    @abstractmethod
    def _read_last(self, name: str) -> Point | None:
        """The last point of a curve that the tracker holds from before."""

    @abstractmethod
    def _close(self) -> None:
        """Write what is pending, and end the tracker's run."""

    @abstractmethod
    def _flush(self) -> None:
        """Write what is pending."""

    def __call__(self, event: Event) -> None:
        """Log an event."""
        self._guarded(lambda: self._take(event))

    def log_task(self, matrix: AccuracyMatrix, result: TaskResult | None = None) -> None:
        """Log the accuracies after a task, in a program of your own; runs do it by themselves.

        Args:
            matrix: The accuracies so far, with a row for the task.
            result: What `Learner.learn` returned, to log the ranks of the bases.
        """
        diagnostics = {} if result is None else result.diagnostics
        self._guarded(lambda: self._log(_task_values(matrix, diagnostics), self._step))

    def restore_row(self, task: int, accuracies: Sequence[float]) -> None:
        """Take in the accuracies after a task that ended before a run was resumed; BWT needs them.

        Args:
            task: The number of the task, from 0.
            accuracies: The accuracy on every task so far.
        """
        self._rows[task] = list(accuracies)

    def close(self) -> None:
        """Write what is pending, and end the tracker's run."""
        self._guarded(self._close)
        self._has_failed = True  # nothing can be logged any more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def last(self, name: str) -> Point | None:
        """The last point of a curve.

        Args:
            name: The curve's name.

        Returns:
            Its step and value; None if there is none.
        """
        if name not in self._points:
            self._points[name] = self._read_last(name)
        return self._points[name]

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            action()
        except Exception as error:
            self._has_failed = True
            warn_user(
                f"{self.title} failed and logs nothing more; training continues "
                f"({type(error).__name__}: {one_line(error)})."
            )

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._ends = event.ends if len(event.ends) == event.tasks else []
        elif isinstance(event, MemoryUpdated):
            self._end_segment(event)
        else:
            self._enter(event.task)
            if isinstance(event, TaskEnded):
                self._end_task(event)
            else:
                self._log_training(event)

    def _log_training(self, event: Progress | EpochEnded) -> None:
        batches = event.batches or 0
        epoch, begin = self._epoch  # the one that goes on, if this process has seen the one before end
        if epoch != event.epoch:
            begin = self._start + event.epoch * batches
        if isinstance(event, Progress):
            self._step = begin + event.batch
            self._log({"train/loss": event.loss}, self._step)
            return
        self._step = begin + batches
        self._epoch = (event.epoch + 1, self._step)
        values = {
            "train/epoch_loss": event.loss,
            "train/lr": self._lr if event.lr is None else event.lr,
            "validation/loss": event.validation_loss,
        }
        self._log({name: value for name, value in values.items() if value is not None}, self._step)
        self._flush()

    def _end_segment(self, event: MemoryUpdated) -> None:
        """Log the ranks; a step is a sample here."""
        last = self.last("segment")
        step = event.samples + (0 if last is None else last[0])
        self._log({"segment": event.segment + 1.0, **_ranks(event.diagnostics)}, step)
        self._flush()

    def _enter(self, task: int) -> None:
        """Find the step at which a task begins."""
        if task == self._task:
            return
        begun = self.last("task")
        if self._ends:
            self._start = self._ends[task - 1] if task else 0
        elif begun is not None and begun[1] == task + 1:  # the task is resumed
            self._start = begun[0]
        else:
            ended = self.last("train/epoch_loss")
            self._start = 0 if ended is None else ended[0]
        ended = self.last("train/epoch_loss")
        self._step = self._start if ended is None else max(ended[0], self._start)
        self._task, self._epoch = task, (0, self._start)
        self._log({"task": task + 1.0}, self._start)

    def _end_task(self, event: TaskEnded) -> None:
        self._rows[event.task] = event.accuracy
        matrix = AccuracyMatrix()
        for task in sorted(task for task in self._rows if task <= event.task):
            matrix.append(self._rows[task], num_tasks=task + 1 - len(matrix))
        self._log(_task_values(matrix, event.method), self._step)
        self._flush()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        new = {}
        for name, value in values.items():
            last = self.last(name)
            if last is None or step > last[0]:
                new[name] = value
                self._points[name] = (step, value)
        if new:
            self._write(new, step)


def _task_values(matrix: AccuracyMatrix, diagnostics: Mapping[str, object]) -> dict[str, float]:
    """The curves that get a point after each task."""
    values = {f"accuracy/task-{number}": value for number, value in enumerate(matrix.last, start=1)}
    values["ACC"] = matrix.acc
    if matrix.bwt is not None:
        values["BWT"] = matrix.bwt
    return {**values, **_ranks(diagnostics)}


def _ranks(diagnostics: Mapping[str, object]) -> dict[str, float]:
    ranks = diagnostics.get("ranks")
    return {f"rank/{name}": float(size["rank"]) for name, size in ranks.items()} if isinstance(ranks, Mapping) else {}
