"""A run interrupted anywhere and resumed gives the same results, weights and log, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import CASES, SMALL, Broken, assert_same_run, broken_off, small, timeless
from torch import Tensor

from steppe import ER
from steppe.checkpoint.io import read_state, write_state
from steppe.cli.main import main
from steppe.errors import DivergedError, UsageError
from steppe.experiments import run as experiment
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.run_directory import lock_directory, read_result
from steppe.experiments.study import Job, read_plan, run_all, write_plan
from steppe.learning import loop as training
from steppe.learning.events import Event, RunStarted
from steppe.learning.task_group import TaskGroup
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.registry import METHODS
from steppe.results.file_names import CHECKPOINTS, CONFIG, LOG, RESULT
from steppe.runtime.rng import Streams
from steppe.settings import TrainingConfig
from steppe.tensors.batch import Batch

pytestmark = pytest.mark.usefixtures("pictures_known")


@pytest.fixture(autouse=True)
def _every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chance to interrupt after every batch."""
    monkeypatch.setattr(training, "_REPORT_EVERY", 0.0)


@pytest.mark.parametrize(("benchmark", "method"), CASES)
def test_resumed_run_equals_uninterrupted_run(benchmark: str, method: str, tmp_path: Path) -> None:
    config = small(benchmark, method)
    events: list[Event] = []
    run(config, tmp_path / "whole", events.append)
    moments = random.Random(f"{benchmark} {method}")
    for _ in range(2):
        broken_off(config, tmp_path / "broken", moments.randint(1, len(events) * 2 // 3))
    run(config, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_interrupted_at_every_event(tmp_path: Path) -> None:
    config = RunConfig.make("pictures", "fs-dgpm", ["benchmark.tasks=2", "benchmark.samples=8", "training.epochs=2"])
    run(config, tmp_path / "whole")
    moment = 1
    while broken_off(config, tmp_path / f"broken {moment}", moment) == moment:
        run(config, tmp_path / f"broken {moment}", resume=True)
        assert_same_run(tmp_path / "whole", tmp_path / f"broken {moment}")
        moment += 1
    assert moment > 9


def test_stopping_saves_a_checkpoint(tmp_path: Path) -> None:
    """At any moment, and however rare checkpoints are: after resuming, no update is repeated."""
    config = RunConfig.make("pictures", "fs-dgpm", ["benchmark.tasks=2", "benchmark.samples=8", "training.epochs=2"])
    events: list[Event] = []
    run(config, tmp_path / "whole", events.append)
    told: list[Event] = []
    for asked in (2, 5, 3):  # events after which each attempt is asked to stop; the first event reports the start
        first = len(told)

        def stop(wanted: int = first + asked) -> BaseException | None:
            return Broken() if len(told) >= wanted else None

        with pytest.raises(Broken):
            run(config, tmp_path / "stopped", told.append, resume=True, checkpoint_every=1e9, stop=stop)
        assert len(told) == first + asked
    run(config, tmp_path / "stopped", told.append, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert [timeless(vars(event)) for event in told if not isinstance(event, RunStarted)] == [
        timeless(vars(event)) for event in events if not isinstance(event, RunStarted)
    ]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_position_is_reported_on_resume(epochs: int, tmp_path: Path) -> None:
    """Within an epoch, at the end of a task after its last epoch, or between tasks."""
    config = RunConfig.make("pmnist", "er", [*SMALL["pmnist"], f"training.epochs={epochs}"])
    places = []
    for moment in range(2, 100):
        if broken_off(config, tmp_path / f"{moment}", moment) < moment:
            break
        started: list[Event] = []

        def callback(event: Event, started: list[Event] = started) -> None:
            started.append(event)
            raise Broken

        with suppress(Broken):
            run(config, tmp_path / f"{moment}", callback, resume=True)
        assert isinstance(started[0], RunStarted)
        places += started[0].remarks
    expected = [
        place
        for task in range(3)
        for place in (
            *([f"resumed after {task} of 3 tasks."] if task else []),
            *(f"resumed after {task} of 3 tasks, in epoch {n + 1} of 'permutation {task + 1}'." for n in range(epochs)),
            f"resumed after {task} of 3 tasks, at the end of 'permutation {task + 1}'.",
        )
    ]
    assert list(dict.fromkeys(place for place in places if place.startswith("resumed"))) == expected


def erratic(curriculum: TaskGroup, network: Network, outputs: int) -> float:
    """A validation loss that depends only on the weights, and rises as often as it falls."""
    first = next(iter(network.trainable.values()))
    return float(first.detach().double().abs().sum()) * 1e4 % 1.0


@pytest.mark.parametrize("method", ["fs-dgpm", "la-maml"])
def test_validation_state_is_resumed(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With learning rates decayed, and decays pending, wherever the run is interrupted."""
    monkeypatch.setattr(TaskGroup, "validation_loss", erratic)
    changes = ["benchmark.tasks=2", "training.epochs=8", "training.patience=2", "training.lr_min=0"]
    config = RunConfig.make("pictures", method, changes)
    events: list[Event] = []
    run(config, tmp_path / "whole", events.append)
    cuts = [number for number, event in enumerate(events, start=1) if getattr(event, "lr", None) is not None]
    assert len(cuts) > 2
    for moment in (cuts[0] - 2, cuts[0] + 2, cuts[1] + 3, cuts[2] + 1):
        broken_off(config, tmp_path / f"{moment}", moment)
        run(config, tmp_path / f"{moment}", resume=True)
        assert_same_run(tmp_path / "whole", tmp_path / f"{moment}")


@pytest.mark.parametrize("other", [{"processor": "an abacus\n\x1b[2J"}, {"system": "an abacus [2J"}])
def test_a_change_of_machine_is_recorded(
    other: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("pictures", "er")
    with monkeypatch.context() as patched:
        patched.setattr(experiment, "machine_info", lambda device="cpu": other)
        broken_off(config, tmp_path / "out", 9)
    result = run(config, tmp_path / "out", resume=True)
    assert [remark for remark in result.remarks if remark.endswith("used another machine: an abacus [2J.")]
    assert read_result(tmp_path / "out") == result  # unknown content does not make it unreadable
    assert result.machine == experiment.machine_info()


def test_a_checkpoint_older_than_a_setting_can_be_resumed(tmp_path: Path) -> None:
    """Of the benchmark, the method or the training: a setting added later counts as having its default."""
    config = small("pictures", "er")
    run(config, tmp_path / "whole")
    broken_off(config, tmp_path / "out", 9)
    for file in (tmp_path / "out" / CHECKPOINTS).glob("state-*"):
        state = read_state(file, "run")
        assert state["learner"]["fitting"] is not None
        for values in (state["config"]["method"], state["learner"]["settings"]["values"]):
            assert values.pop("clip") == ER().clip
        for values in (state["config"]["training"], state["learner"]["fitting"]["training"]):
            assert values.pop("lr_divisor") == TrainingConfig().lr_divisor
        assert state["config"]["benchmark"].pop("samples") == type(config.benchmark_settings)().samples  # type: ignore[attr-defined]
        write_state(file, "run", state)
    run(config, tmp_path / "out", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize(
    "config", [None, [], {}, {"run": 3}, {"run": {}, "benchmark": 3, "method": {}, "training": {"epochs": "x"}}]
)
def test_a_checkpoint_with_an_invalid_config_is_rejected(config: Any) -> None:
    assert not small("pictures", "er").matches(config)


def test_a_finished_run_is_not_changed(tmp_path: Path) -> None:
    config = small("pictures", "er")
    run(config, tmp_path / "out")
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    (tmp_path / "out" / "report.md").unlink()  # as if killed just before it was written
    run(config, tmp_path / "out", resume=True)
    assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == before


def test_a_run_with_different_settings_is_not_resumed(tmp_path: Path) -> None:
    broken_off(small("pictures", "er"), tmp_path / "out", 9)
    with pytest.raises(UsageError, match="different settings"):
        run(small("pictures", "finetune"), tmp_path / "out", resume=True)


def test_divergence_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("pictures", "er")
    run(config, tmp_path / "whole")
    method = type(config.method_settings.start(*_started(config)))
    observe, calls = method.observe, iter(range(40))

    def poisoned(self: Any, batch: Batch) -> Tensor:
        loss = observe(self, batch)
        if next(calls, None) is None:
            next(iter(self.network.trainable.values())).data.fill_(torch.nan)
        return loss

    with monkeypatch.context() as patched:
        patched.setattr(method, "observe", poisoned)
        with pytest.raises(DivergedError, match=r"task 'pictures 2', epoch \d, update"):
            run(config, tmp_path / "out", checkpoint_every=0)
    assert len(list((tmp_path / "out" / CHECKPOINTS).glob("state-*"))) == 2
    assert json.loads((tmp_path / "out" / LOG).read_text(encoding="utf-8").splitlines()[-1])["event"] == "Stopped"
    run(config, tmp_path / "out", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "out")


def _started(config: RunConfig) -> tuple[Network, dict[str, ProjectedWeight], Streams]:
    return Network(config.benchmark_settings.model(0)), {}, Streams(0)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    config = small("pictures", "er")
    broken_off(config, tmp_path / "out", 9)
    with lock_directory(tmp_path / "out"), pytest.raises(UsageError, match="another process is using"):
        run(config, tmp_path / "out", resume=True)
    run(config, tmp_path / "out", resume=True)


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path: Path) -> None:
    config = small("pictures", "fs-dgpm")
    run(config, tmp_path / "whole")
    broken_off(config, tmp_path / "out", 20)
    last = sorted((tmp_path / "out" / CHECKPOINTS).glob("state-*"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    told: list[str] = []
    run(config, tmp_path / "out", lambda event: told.extend(getattr(event, "remarks", [])), resume=True)
    assert any(last.name in remark and "Using the previous checkpoint instead" in remark for remark in told)
    assert_same_run(tmp_path / "whole", tmp_path / "out")


@pytest.fixture
def _one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def remarks_on_threads(out: Path) -> list[str]:
    return [remark for remark in read_result(out).remarks if "threads" in remark]


@pytest.mark.usefixtures("_one_thread_again")
def test_resume_with_more_threads(tmp_path: Path) -> None:
    """The bits may differ then, so the result says so; up to rounding it is the same."""
    config = small("pmnist", "fs-dgpm")
    whole = run(config, tmp_path / "whole")
    broken_off(config, tmp_path / "out", 8)
    assert main(["resume", str(tmp_path / "out"), "--threads", "2"]) == 0
    result = read_result(tmp_path / "out")
    assert torch.get_num_threads() == 2
    assert RunConfig.load(tmp_path / "out" / CONFIG).threads == result.config["run"]["threads"] == 2
    assert remarks_on_threads(tmp_path / "out") == ["the first part of the run used --threads 1."]
    assert result.acc == pytest.approx(whole.acc, abs=5)
    assert not remarks_on_threads(tmp_path / "whole")


@pytest.mark.usefixtures("_one_thread_again")
def test_resume_a_study_with_more_threads(tmp_path: Path) -> None:
    """Finished runs do not change, and study.json records how each run was done."""
    jobs = [Job(small("pmnist", method), tmp_path / method) for method in ("er", "finetune", "gpm")]
    run(jobs[0].config, jobs[0].out)
    broken_off(jobs[1].config, jobs[1].out, 8)
    write_plan(tmp_path, jobs, "steppe study")
    kept = (jobs[0].out / RESULT).read_bytes()
    assert main(["resume", str(tmp_path), "--jobs", "1", "--threads", "2"]) == 0
    assert (jobs[0].out / RESULT).read_bytes() == kept
    assert [len(remarks_on_threads(job.out)) for job in jobs] == [0, 1, 0]
    assert [job.config.threads for job in read_plan(tmp_path)[0]] == [1, 2, 2]
    assert main(["resume", str(tmp_path)]) == 0


def test_different_settings_are_rejected_whatever_the_threads(tmp_path: Path) -> None:
    broken_off(small("pmnist", "er"), tmp_path, 8)
    changed = RunConfig.make("pmnist", "er", [*SMALL["pmnist"], "buffer=7"], threads=2)
    reseeded = RunConfig.make("pmnist", "er", SMALL["pmnist"], threads=2, seed=1)
    for other in (changed, reseeded):
        with pytest.raises(UsageError, match="different settings"):
            run(other, tmp_path, resume=True)


@pytest.fixture
def fragile() -> Iterator[str]:
    """A plugin whose method fails for some seeds; unregistered afterwards."""
    yield str(Path(__file__).parents[2] / "bench" / "fragile.py")
    METHODS.pop("fragile")


def test_a_study_continues_after_failures_and_can_be_resumed(tmp_path: Path, fragile: str) -> None:
    changes = ["benchmark.tasks=1", "benchmark.samples=20", "benchmark.test_samples=20"]
    jobs = [
        Job(RunConfig.make("pmnist", "fragile", changes, seed=seed, plugins=[fragile]), tmp_path / str(seed))
        for seed in (0, 1, 10, 20)
    ]
    for resume in (False, True):
        outcome = run_all(jobs, 2, lambda number, message: None, resume=resume)
        assert list(outcome.results) == [1]
        reasons = [outcome.failures[number].reason for number in (0, 2, 3)]
        assert all(part in reason for part, reason in zip(("code 9", "injected", "nan"), reasons, strict=True))
