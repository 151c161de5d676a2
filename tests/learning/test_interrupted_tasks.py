"""A task stopped by the user is ended like any other: its protection is complete."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import SEQUENTIAL, Small, settings_of, task
from torch import Tensor, nn

import steppe
from steppe import ER, GPM, DivergedError, Learner, Task
from steppe.learning.events import EpochEnded, Event
from steppe.learning.phases import PendingEnd

HOW: dict[str, Any] = {"batch_size": 6, "freeze_norms": True}


class EnoughError(Exception):
    """Raised by the user's callback."""


def stop_after(epochs: int, kind: type[BaseException] = EnoughError) -> Any:
    def callback(event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch + 1 == epochs:
            raise kind

    return callback


def create_learner(method: str) -> Learner:
    torch.manual_seed(0)
    return Learner(Small(), settings_of(method, "cifar100-superclass"), seed=3)


def values(state: Any) -> list[Any]:
    """All numbers in a state as one vector, without times."""
    if isinstance(state, dict):
        return [each for key, value in sorted(state.items(), key=str) for each in [key, *values(value)]]
    if isinstance(state, (list, tuple)):
        return [each for value in state for each in values(value)]
    if isinstance(state, steppe.Batch):
        return values([state.x, state.y, state.task])
    return [state.tolist() if isinstance(state, Tensor) else state]


@pytest.mark.parametrize("use", ["learn", "evaluate", "predict", "save"])
@pytest.mark.parametrize("kind", [EnoughError, KeyboardInterrupt])
def test_next_use_ends_the_task(use: str, kind: type[BaseException], tmp_path: Path) -> None:
    learner = create_learner("gpm")
    with pytest.raises(kind):
        learner.learn(task(0), epochs=9, callback=stop_after(2, kind), **HOW)
    if use == "learn":
        learner.learn(task(1), **HOW)
    elif use == "evaluate":
        learner.evaluate(task(0))
    elif use == "predict":
        learner.predict(torch.rand(2, 3, 6, 6), head=range(2))
    else:
        learner.save(tmp_path / "learner")
        learner = steppe.load(tmp_path / "learner", Small())
    method: Any = learner._method
    assert method.tasks_done == (2 if use == "learn" else 1)
    assert method.memory_bytes()["bases"] > 0


@pytest.mark.parametrize("patience", [0, 1])
@pytest.mark.parametrize("method", SEQUENTIAL)
def test_stopping_equals_fewer_epochs(method: str, patience: int) -> None:
    """Everything is equal bit for bit, also after another task; with validation, the best weights are restored."""
    whole, broken = create_learner(method), create_learner(method)
    whole.learn(task(0), epochs=2, patience=patience, **HOW)
    with pytest.raises(EnoughError):
        broken.learn(task(0), epochs=9, patience=patience, callback=stop_after(2), **HOW)
    assert broken.evaluate(task(0)) == whole.evaluate(task(0))
    assert values(broken.state_dict()) == values(whole.state_dict())
    for learner in (whole, broken):
        learner.learn(task(1), **HOW)
    assert values(broken.state_dict()) == values(whole.state_dict())


def test_task_is_ended_once_and_not_from_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback may evaluate and save without ending the task."""
    learner = create_learner("er")
    ended: list[int] = []
    method: Any = learner.validate(task(0))
    monkeypatch.setattr(method, "end_task", lambda: ended.append(learner.num_tasks) or [])

    def callback(event: Event) -> None:
        learner.evaluate(task(0))
        learner.state_dict()
        assert not ended
        stop_after(2)(event)

    with pytest.raises(EnoughError):
        learner.learn(task(0), epochs=9, callback=callback, **HOW)
    assert not ended  # not before the next use
    for _ in range(2):
        learner.evaluate(task(0))
    assert ended == [1]


def test_failed_task_is_not_ended() -> None:
    """It was rolled back."""
    learner = Learner(nn.Linear(4, 4), GPM(lr=3e38, clip=0.0))
    with pytest.raises(DivergedError):
        learner.learn(Task((100 * torch.randn(12, 4), torch.arange(12) % 4)), batch_size=12)
    assert not isinstance(learner.phase, PendingEnd)


def test_non_finite_weights_are_not_saved(tmp_path: Path) -> None:
    """A good file would be overwritten with a useless one."""
    data = 100 * torch.randn(12, 4), torch.arange(12) % 4
    learner = Learner(nn.Linear(4, 4), ER(lr=3e38, clip=0.0))
    learner.save(tmp_path / "learner")
    before = (tmp_path / "learner").read_bytes()
    with pytest.raises(DivergedError):
        learner.learn(Task(data), batch_size=12)
    assert not all(bool(torch.isfinite(p).all()) for p in learner.model.parameters())
    with pytest.raises(DivergedError, match=r"weight .* no longer finite since a task failed; .* saved before"):
        learner.save(tmp_path / "learner")
    assert (tmp_path / "learner").read_bytes() == before
    steppe.load(tmp_path / "learner", nn.Linear(4, 4)).evaluate(Task(data, data))


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="this system has no such signals")
def test_learner_is_intact_after_an_interrupt_anywhere(tmp_path: Path) -> None:
    """A short form of `make torture`, in its own process, because only the main thread receives signals."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "stress" / "interrupt_torture.py")]
    done = subprocess.run(
        [*command, "--interrupts", "40"], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"broken": 0' in done.stdout
