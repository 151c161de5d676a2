"""What a run tells while it goes: small records that a display, a log or another process can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunStarted:
    """The tasks are there and learning begins."""

    tasks: int
    batches: int
    remarks: list[str] = field(default_factory=list)
    batches_before: int = 0
    """How many of them were done before the run was resumed, counting whole epochs only."""
    ends: list[int] = field(default_factory=list)
    """How many are done, or no longer to come, when each task has ended."""


@dataclass(frozen=True)
class Progress:
    """Some batches further within an epoch."""

    task: int
    epoch: int
    epochs: int
    batch: int
    batches: int
    loss: float


@dataclass(frozen=True)
class EpochEnded:
    """One epoch of a task is done."""

    task: int
    name: str
    epoch: int
    batches: int
    loss: float
    updates: int
    seconds: float
    validation_loss: float | None = None
    lr: float | None = None
    """The step size after the epoch, where validation has cut it."""


@dataclass(frozen=True)
class TaskEnded:
    """A task is learnt and all tasks seen so far are tested."""

    task: int
    name: str
    accuracy: list[float]
    seconds: dict[str, float]
    bytes: dict[str, int]
    updates: int
    remarks: list[str] = field(default_factory=list)
    method: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """The processor's seconds by kind, where all of them were recorded."""


Event = RunStarted | Progress | EpochEnded | TaskEnded
Callback = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Watch nothing."""
