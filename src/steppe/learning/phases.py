"""What a learner is doing: its phase is exactly one of these.

Idle ──learn──▶ Learning ──▶ Idle
├─ stopped by the callback or Ctrl-C ─▶ PendingEnd ──next use──▶ Idle
└─ failed ──rolled back──▶ Idle, or Broken where that is impossible
load_state_dict ──▶ Idle, or Interrupted if the state was saved within a task; then learn ──▶ Learning
Idle ──observe──▶ Streaming ──every so many samples, update_memory or learn──▶ Idle
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.learning.loop import TrainingLoop


@dataclass(frozen=True)
class Idle:
    """Between tasks, or before the first one."""


@dataclass(frozen=True)
class Learning:
    """Within `learn`; its callback or another thread may evaluate, predict and save."""

    loop: TrainingLoop


@dataclass(frozen=True)
class Interrupted:
    """Loaded from a state that was saved within a task, which `learn` must be given again."""

    loop_state: State


@dataclass(frozen=True)
class PendingEnd:
    """A task was stopped by the callback or Ctrl-C. What it learned is kept; its end is still to be run."""

    name: str
    best: Mapping[str, Tensor]
    """The best weights by validation; empty without validation."""
    threads: int
    """How many threads the task was learned with."""


@dataclass(frozen=True)
class Streaming:
    """Within a segment of a stream, between two calls of `observe`; predicting, evaluating and saving are allowed."""

    samples: int
    """How many were learned since the memory was last updated."""


@dataclass(frozen=True)
class Broken:
    """A task failed and could not be rolled back."""

    reason: str


Phase = Idle | Learning | Interrupted | PendingEnd | Streaming | Broken
