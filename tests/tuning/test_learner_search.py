"""`steppe.search` for a model and tasks of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("optuna", reason="a search needs Optuna")

import steppe
from steppe import ER, Learner, Task, UsageError
from steppe.errors import RunError
from steppe.settings import log_range, one_of


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def make_tasks(count: int = 3, *, test: bool = False) -> list[Task]:
    draws = torch.Generator().manual_seed(0)
    tasks = []
    for number in range(count):
        direction = torch.randn(6, generator=draws)
        parts = []
        for _ in range(2):
            x = torch.randn(60, 6, generator=draws)
            parts.append((x, (x @ direction > 0).long()))
        tasks.append(Task(parts[0], parts[0] if test else None, val=parts[1], name=f"task {number}"))
    return tasks


class Interrupted(BaseException):
    """Stands for the end of the process."""


def test_it_returns_the_best_settings_of_trials_on_validation_data(tmp_path: Path) -> None:
    found = steppe.search(make_model, make_tasks(), ER(lr=1e-3), out=tmp_path / "s", trials=8, epochs=3)
    assert len(found.trials) == 8
    assert found.trials[0].values == {"lr": 1e-3}
    assert found.score == max(trial.score for trial in found.trials if trial.score is not None)
    assert found.score > (found.trials[0].score or 100)
    learner = Learner(_same_start(), found.method)  # the score can be repeated
    tasks = make_tasks()
    for task in tasks:
        learner.learn(task, epochs=3)
    again = learner.evaluate([Task(task.train, task.val) for task in tasks])
    assert sum(again) / 3 == pytest.approx(found.score)
    assert found.table.count("\n") == 10
    assert (tmp_path / "s" / "trials.md").read_text("utf-8") == found.table


def _same_start() -> nn.Module:
    from steppe.runtime.rng import Streams, preserve_global_rng

    with preserve_global_rng(seed=Streams(0).derive_seed("model")):
        return make_model()


@pytest.mark.parametrize("moment", [1, 4, 9, 14, 20])
def test_interrupted_at_any_task_it_makes_the_same_trials(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"trials": 9, "epochs": 2}
    whole = steppe.search(make_model, make_tasks(), "er", out=tmp_path / "whole", **arguments)
    seen, learn = 0, Learner.learn

    def stops(self: Learner, *given: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == moment:
            raise Interrupted
        return learn(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "learn", stops)
        with pytest.raises(Interrupted):
            steppe.search(make_model, make_tasks(), "er", out=tmp_path / "stopped", **arguments)
    again = steppe.search(make_model, make_tasks(), "er", out=tmp_path / "stopped", **arguments)
    assert again.trials == whole.trials
    assert again.method == whole.method
    assert not list((tmp_path / "stopped" / "trials").glob("*.learner"))


def test_several_processes(tmp_path: Path) -> None:
    found = steppe.search(make_model, make_tasks(), "er", out=tmp_path, trials=4, jobs=2, epochs=1, prune=False)
    assert [trial.state for trial in found.trials] == ["complete"] * 4
    alone = steppe.search(
        make_model, make_tasks(), ER(lr=found.trials[2].values["lr"]), out=tmp_path / "one", trials=1, epochs=1
    )
    assert alone.score == found.trials[2].score
    with pytest.raises(UsageError, match="jobs above 1 need picklable arguments"):
        steppe.search(lambda: make_model(), make_tasks(), "er", out=tmp_path / "bad", trials=2, jobs=2)


def test_chosen_on_the_first_tasks(tmp_path: Path) -> None:
    found = steppe.search(make_model, make_tasks(), "er", out=tmp_path, trials=2, choose_on=2)
    assert [sorted(trial.scores) for trial in found.trials] == [[1, 2]] * 2


def test_lower_may_be_better(tmp_path: Path) -> None:
    def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) != target).float().mean()

    found = steppe.search(
        make_model, make_tasks(2), "er", out=tmp_path, trials=6, minimize=True, learner={"metric": error}
    )
    assert found.score == min(trial.score for trial in found.trials if trial.score is not None)


def test_a_space_of_ones_own_and_methods_that_learn_all_at_once(tmp_path: Path) -> None:
    space = {"lr": log_range(0.05, 0.1), "momentum": one_of(0.0, 0.5)}
    found = steppe.search(make_model, make_tasks(), "multitask", out=tmp_path, trials=3, space=space)
    assert set(found.trials[0].values) == {"lr", "momentum"}
    assert all(set(trial.scores) == {3} for trial in found.trials)


def test_divergence_and_failure(tmp_path: Path) -> None:
    space = {"lr": one_of(0.01, 1e30), "clip": one_of(0.0)}
    found = steppe.search(make_model, make_tasks(2), ER(clip=0), out=tmp_path / "a", trials=5, space=space, epochs=3)
    assert {trial.note for trial in found.trials} == {"", "diverged"}
    assert found.method.as_dict()["lr"] == 0.01
    with pytest.raises(RunError, match="no trial was completed"):
        steppe.search(bad_model, make_tasks(2), "er", out=tmp_path / "b", trials=2, jobs=2)


def bad_model() -> nn.Module:
    return nn.Linear(5, 2)


def test_invalid_arguments(tmp_path: Path) -> None:
    tasks = make_tasks()
    blind = [Task(tasks[0].train, name="blind")]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tasks": blind}, "blind: a search needs validation data"),
        ({"tasks": []}, "at least one task"),
        ({"choose_on": 3}, "must be less than the number of tasks, 3"),
        ({"method": "err"}, "Did you mean 'er'"),
        ({"method": 3}, "method must be a method's settings or name"),
        ({"epoch": 3}, "Did you mean 'epochs'"),
        ({"learner": {"seed": 3}}, "seed is an argument of search itself"),
        ({"trials": 0}, "must be at least 1"),
        ({"space": {"lrr": log_range(1, 2)}}, "Did you mean 'lr'"),
    ]
    for changes, message in cases:
        arguments = {"make_model": make_model, "tasks": tasks, "method": "er", "out": tmp_path / "s", **changes}
        with pytest.raises(UsageError, match=message):
            steppe.search(**arguments)
    assert not (tmp_path / "s").exists()
    steppe.search(make_model, tasks, "er", out=tmp_path / "s", trials=1)
    with pytest.raises(UsageError, match="a search with other settings"):
        steppe.search(make_model, tasks, "er", out=tmp_path / "s", trials=1, epochs=2)
    assert json.loads((tmp_path / "s" / "trials.json").read_text("utf-8"))["best"] == 0
