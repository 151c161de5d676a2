"""`steppe resume --tasks`: a run truncated to fewer tasks equals one started with that number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_runs import Broken, assert_same_run, broken_off, small

from steppe.cli.main import main
from steppe.errors import UsageError
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.run_directory import RunDirectory, read_result, weight_checkpoints
from steppe.experiments.study import read_plan
from steppe.experiments.truncate_runs import truncate_runs
from steppe.learning import loop as training
from steppe.learning.events import Event
from steppe.results.file_names import CONFIG, RESULT

pytestmark = pytest.mark.usefixtures("pictures_known")
SHORT = ["--set", "benchmark.samples=40", "--set", "benchmark.test_samples=50"]


@pytest.fixture(autouse=True)
def _every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_REPORT_EVERY", 0.0)


def begun(config: RunConfig, out: Path, tasks: int, event_name: str = "Progress", every: float = 0) -> None:
    """A run interrupted by the first such event in the task with this number, counted from 1."""
    ended = 0

    def callback(event: Event) -> None:
        nonlocal ended
        ended += type(event).__name__ == "TaskEnded"
        if ended == tasks - 1 and type(event).__name__ == event_name:
            raise Broken

    with pytest.raises(Broken):
        run(config, out, callback, resume=True, checkpoint_every=every)


@pytest.mark.parametrize("method", ["fs-dgpm", "gpm", "ewc", "la-maml", "a-gem", "oracle"])
@pytest.mark.parametrize("stopped_in", [1, 2])
def test_truncated_run_equals_shorter_run_bit_for_bit(method: str, stopped_in: int, tmp_path: Path) -> None:
    config = small("pmnist", method)
    described = config.as_dict()
    fewer = RunConfig.from_mapping({**described, "benchmark": {**described["benchmark"], "tasks": 2}})
    run(fewer, tmp_path / "short")
    begun(config, tmp_path / "cut", stopped_in)
    (shorter,) = truncate_runs({tmp_path / "cut": config}, 2)
    assert shorter == fewer
    run(shorter, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "short", tmp_path / "cut")


def test_truncating_goes_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    """The state at the end of a task is kept until two more have been saved; later lines of the log are removed."""
    config = small("pmnist", "er")
    run(RunConfig.make("pmnist", "er", ["tasks=2", "samples=40", "test_samples=50"]), tmp_path / "short")
    begun(config, tmp_path / "cut", 3, "EpochEnded", every=1e9)
    run(*truncate_runs({tmp_path / "cut": config}, 2), tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "short", tmp_path / "cut")


def test_truncating_without_an_earlier_checkpoint_is_an_error(tmp_path: Path) -> None:
    config = small("pmnist", "er")
    begun(config, tmp_path, 3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix}
    with pytest.raises(UsageError, match="cannot be truncated to 1 task: it has started more"):
        truncate_runs({tmp_path: config}, 1)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix}
    run(config, tmp_path, resume=True)


def test_no_run_is_truncated_if_one_cannot_be(tmp_path: Path) -> None:
    config = small("pmnist", "er")
    begun(config, tmp_path / "early", 1)
    begun(config, tmp_path / "late", 3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="late cannot be truncated to 1 task"):
        truncate_runs({tmp_path / "early": config, tmp_path / "late": config}, 1)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("moment", ["save_state", "create"])
def test_interrupted_truncation_can_be_repeated(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("pmnist", "er")
    run(RunConfig.make("pmnist", "er", ["tasks=2", "samples=40", "test_samples=50"]), tmp_path / "short")
    begun(config, tmp_path / "cut", 2)

    def killed(*given: object, **options: object) -> None:
        raise Broken

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, moment, killed)
        with pytest.raises(Broken):
            truncate_runs({tmp_path / "cut": config}, 2)
    run(*truncate_runs({tmp_path / "cut": config}, 2), tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "short", tmp_path / "cut")


@pytest.mark.parametrize(
    ("benchmark", "method", "tasks", "message"),
    [
        ("pmnist", "er", 4, "has 3 tasks; it can only be truncated to fewer"),
        ("pmnist", "multitask", 2, "learns all tasks at once"),
        ("pictures", "er", 2, "differs from the start"),  # its network has outputs for all tasks
        ("pmnist", "er", 0, "tasks"),
    ],
)
def test_invalid_truncations_are_rejected(
    benchmark: str, method: str, tasks: int, message: str, tmp_path: Path
) -> None:
    config = small(benchmark, method)
    broken_off(config, tmp_path, 2)
    before = (tmp_path / CONFIG).read_bytes()
    with pytest.raises(UsageError, match=message):
        truncate_runs({tmp_path: config}, tasks)
    assert (tmp_path / CONFIG).read_bytes() == before


def test_resume_with_fewer_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small("pmnist", "er")
    begun(config, tmp_path / "run", 2)
    assert main(["resume", str(tmp_path / "run"), "--tasks", "2"]) == 0
    result = read_result(tmp_path / "run")
    assert (len(result.accuracy), result.config["benchmark"]["tasks"]) == (2, 2)
    assert not result.is_canonical
    assert "--set benchmark.tasks=2" in result.command
    assert main(["resume", str(tmp_path / "run"), "--tasks", "1"]) == 2
    assert "is finished" in capsys.readouterr().err


def test_truncating_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    words = ["study", "pmnist", "er", "finetune", "--seeds", "1", "--jobs", "1", "--tasks", "3", *SHORT]
    assert main([*words, "--out", str(out)]) == 0
    (out / "er" / "seed-0" / RESULT).unlink()  # as if in progress, without a checkpoint
    assert main(["resume", str(out), "--tasks", "2"]) == 2  # the other one has learned three
    assert "finetune/seed-0 is finished" in capsys.readouterr().err
    shutil.rmtree(out / "finetune")  # as if it had not started
    assert main(["resume", str(out), "--tasks", "2", "--jobs", "1"]) == 0
    jobs, command = read_plan(out)
    assert [job.config.as_dict()["benchmark"]["tasks"] for job in jobs] == [2, 2]
    assert command.endswith("--set benchmark.tasks=2")
    assert command.count("tasks=") == 1
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert table["command"] == command
    assert {len(read_result(job.out).accuracy) for job in jobs} == {2}
    assert {len(weight_checkpoints(job.out)) for job in jobs} == {2}
