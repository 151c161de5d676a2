"""Progress of a run as small records, for a display, a log or another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunStarted:
    """The tasks are loaded, and learning begins."""

    tasks: int
    batches: int
    remarks: list[str] = field(default_factory=list)
    batches_before: int = 0
    """How many of them were done before the run was resumed, in whole epochs."""
    ends: list[int] = field(default_factory=list)
    """How many are done or skipped by the end of each task."""


@dataclass(frozen=True)
class Progress:
    """Progress within an epoch, reported a few times per second.

    Attributes:
        task: The number of the task, from 0.
        epoch: The number of the epoch, from 0.
        epochs: The most epochs there can be.
        batch: Batches done in this epoch.
        batches: Batches per epoch; None for a stream that does not know it.
        loss: Mean training loss since the last report.
    """

    task: int
    epoch: int
    epochs: int
    batch: int
    batches: int | None
    loss: float


@dataclass(frozen=True)
class EpochEnded:
    """An epoch of a task is done.

    Attributes:
        task: The number of the task, from 0.
        name: Its name.
        epoch: The number of the epoch, from 0.
        batches: Batches in the epoch.
        loss: Mean training loss over the epoch.
        updates: Updates since the task began.
        seconds: How long the epoch took.
        validation_loss: With `patience`.
        lr: The learning rate after the epoch, if validation has lowered it.
    """

    task: int
    name: str
    epoch: int
    batches: int
    loss: float
    updates: int
    seconds: float
    validation_loss: float | None = None
    lr: float | None = None


@dataclass(frozen=True)
class TaskEnded:
    """A task is learned and all tasks so far are evaluated."""

    task: int
    name: str
    accuracy: list[float]
    seconds: dict[str, float]
    bytes: dict[str, int]
    updates: int
    remarks: list[str] = field(default_factory=list)
    method: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds by kind, where all of them were recorded."""


@dataclass(frozen=True)
class MemoryUpdated:
    """The method's memory was updated while learning from a stream.

    Attributes:
        segment: The number of the segment that ended, counted like tasks, from 0.
        samples: How many samples it had.
        remarks: What the user should know, such as a weight that can no longer learn.
        bytes: Memory that the method holds, by kind.
        diagnostics: What the method records, such as the ranks of its bases.
    """

    segment: int
    samples: int
    remarks: list[str] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)


Event = RunStarted | Progress | EpochEnded | TaskEnded | MemoryUpdated
Callback = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The callback that does nothing."""
