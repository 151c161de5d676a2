"""The time left, as shown while a run is in progress."""

from __future__ import annotations

import pytest

from steppe.cli import progress as display
from steppe.learning.events import EpochEnded, RunStarted, TaskEnded


def test_time_left_excludes_epochs_skipped_by_early_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 30.0, 60.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    state = display._RunProgress("er seed 0")
    state.update(RunStarted(2, 200, ends=[100, 200]))
    for task in range(2):
        for epoch in range(3):  # of ten
            state.update(EpochEnded(task, "task", epoch, 10, 1.0, 0, 1.0))
        state.update(TaskEnded(task, "task", [50.0] * (task + 1), {}, {}, 0))
        assert state.describe().endswith(["30 s left", "0 s left"][task])


def test_time_left_after_a_task_of_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 10.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    state = display._RunProgress("er seed 0")
    state.update(RunStarted(3, 300, ends=[100, 200, 300]))
    state.update(EpochEnded(0, "task", 0, 100, 1.0, 0, 1.0))
    state.update(TaskEnded(0, "task", [50.0], {}, {}, 0))
    assert state.describe().endswith("20 s left")


def test_time_left_of_a_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 10.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    state = display._RunProgress("er seed 0")
    state.update(RunStarted(3, 300, batches_before=110, ends=[100, 200, 300]))
    state.update(EpochEnded(1, "task", 1, 10, 1.0, 0, 1.0))
    state.update(TaskEnded(1, "task", [50.0, 50.0], {}, {}, 0))
    assert state.describe().endswith("11 s left")  # 100 of 190 remain
