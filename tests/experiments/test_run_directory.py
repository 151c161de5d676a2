"""The run directory: complete when a run ends well, and honest when it does not."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import steppe
from steppe.errors import DivergedError, RunError, UsageError
from steppe.experiments import run_directory as runs
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.run_directory import RunDirectory
from steppe.results.schema import RunResult
from steppe.results.tables import as_json, latex, markdown, summary
from steppe.runtime.environment import machine_info

SHORT = ["tasks=3", "samples=60", "test_samples=200"]


def without_times(result: RunResult) -> RunResult:
    per_task = [replace(stage, seconds={}, cpu_seconds=None) for stage in result.per_task]
    return replace(result, seconds={}, cpu_seconds=None, per_task=per_task)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    out = tmp_path_factory.mktemp("runs") / "one"
    return out, run(RunConfig.make("pmnist", "fs-dgpm", SHORT, seed=3), out)


def test_result_contains_what_figures_need(finished: tuple[Path, RunResult]) -> None:
    out, result = finished
    stored = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(result.as_dict()))
    matrix = stored["accuracy"]
    assert [[value is None for value in row] for row in matrix] == [
        [False, True, True],
        [False, False, True],
        [False, False, False],
    ]
    assert stored["acc"] == pytest.approx(sum(matrix[2]) / 3)
    assert stored["bwt"] == pytest.approx(((matrix[2][0] - matrix[0][0]) + (matrix[2][1] - matrix[1][1])) / 2)
    assert stored["updates"] == 3 * 6 * 5
    assert set(stored["seconds"]) == {"train", "evaluate", "memory"}
    assert stored["bytes"]["replay"] == 200 * (784 + 8 + 8)
    assert [task["updates"] for task in stored["per_task"]] == [30, 30, 30]
    assert stored["per_task"][-1]["bytes"] == stored["bytes"]
    assert sum(task["seconds"]["train"] for task in stored["per_task"]) == pytest.approx(stored["seconds"]["train"])
    assert stored["versions"]["torch"] == torch.__version__
    assert stored["machine"] == machine_info()
    assert not stored["full_length"]


def test_log_has_a_record_per_task_and_epoch(finished: tuple[Path, RunResult]) -> None:
    out, result = finished
    records = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    kinds = [record["event"] for record in records]
    assert kinds == ["RunStarted", *["EpochEnded", "TaskEnded"] * 3]
    assert (records[0]["ends"], records[0]["batches"]) == ([6, 12, 18], 18)
    ended = [record for record in records if record["event"] == "TaskEnded"]
    assert [record["accuracy"] for record in ended] == [row[: i + 1] for i, row in enumerate(result.accuracy)]
    assert ended[0]["method"]["importances"] == {}
    assert len(ended[1]["method"]["importances"]["first.weight"]["deciles"]) == 11
    assert 0 < ended[0]["method"]["ranks"]["head.weight"]["rank"] <= 100
    assert "basis_samples = 200 exceeds the buffer's 60 samples" in ended[0]["remarks"][0]


def test_checkpoints_are_the_weights_after_each_task(finished: tuple[Path, RunResult]) -> None:
    out, result = finished
    benchmark = steppe.PMNIST(tasks=3, samples=60, test_samples=200)
    model = benchmark.model(99)
    learner = steppe.Learner(model, steppe.Finetune())
    for place in range(3):
        model.load_state_dict(load_file(out / "checkpoints" / f"task-{place + 1:03d}.safetensors"))
        assert learner.evaluate(benchmark.stream(3)[: place + 1]) == result.accuracy[place][: place + 1]


def test_config_file_reruns_it_exactly(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    out, result = finished
    again = run(RunConfig.load(out / "config.toml"), tmp_path / "again")
    assert without_times(again) == without_times(result)


def test_report_names_the_run(finished: tuple[Path, RunResult]) -> None:
    out, result = finished
    text = (out / "report.md").read_text(encoding="utf-8")
    assert f"ACC {result.acc:.2f}" in text
    assert result.command in text
    assert "published figures do not apply" in text


def test_a_directory_with_a_run_is_rejected(finished: tuple[Path, RunResult]) -> None:
    out, _ = finished
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(UsageError, match="already contains a run"):
        run(RunConfig.make("pmnist", "er", SHORT), out)
    assert sorted(path.name for path in out.iterdir()) == before


def test_a_full_disk_leaves_no_partial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"no space left on disk; fix that, or choose another location"):
        run(RunConfig.make("pmnist", "er", SHORT), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_complete_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def soon_full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 4:  # the configuration and one checkpoint fit, each with its directory
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", soon_full)
    with pytest.raises(RunError, match="no space left"):
        run(RunConfig.make("pmnist", "er", SHORT), tmp_path / "out")
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {".lock", "config.toml", "log.jsonl", "checkpoints/task-001.safetensors"}
    last = json.loads((tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["event"] == "Stopped"
    with pytest.raises(UsageError, match="unfinished run"):
        runs.read_result(tmp_path / "out")


def test_divergence_is_reported_and_recorded(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"task 'permutation \d', epoch 1, update \d+"):
        run(RunConfig.make("pmnist", "finetune", [*SHORT, "lr=1e30", "clip=0"]), tmp_path / "out")
    assert not (tmp_path / "out" / "result.json").exists()
    assert "the loss became" in (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8")


def test_the_tasks_do_not_depend_on_the_method() -> None:
    """The same seed gives the same samples for every method and buffer size, and the same untrained network."""
    benchmark = steppe.PMNIST(tasks=2, samples=50)
    wanted = [task.train.take(torch.arange(50)) for task in benchmark.stream(5)]
    for method in (steppe.FSDGPM(buffer=20), steppe.ER(buffer=7), steppe.Finetune()):
        tasks = benchmark.stream(5)
        learner = steppe.Learner(benchmark.model(5), method, seed=5)
        for task, (x, y) in zip(tasks, wanted, strict=True):
            learner.learn(task, updates_per_batch=2)
            found_x, found_y = task.train.take(torch.arange(50))
            assert torch.equal(found_x, x)
            assert torch.equal(found_y, y)


def test_library_and_command_line_agree(finished: tuple[Path, RunResult]) -> None:
    _, result = finished
    benchmark = steppe.PMNIST(tasks=3, samples=60, test_samples=200)
    tasks = benchmark.stream(3)
    learner = steppe.Learner(benchmark.model(3), steppe.FSDGPM(), seed=3)
    matrix = steppe.AccuracyMatrix()
    for place, task in enumerate(tasks):
        learner.learn(task, epochs=1, batch_size=10, updates_per_batch=5)
        matrix.append(learner.evaluate(tasks[: place + 1]))
    assert matrix.square() == result.accuracy


def test_forward_transfer_is_measured_before_each_task() -> None:
    changes = ["benchmark.tasks=3", "benchmark.samples=60", "benchmark.test_samples=80"]
    result = run(RunConfig.make("pmnist", "er", changes, seed=1))
    benchmark = steppe.PMNIST(tasks=3, samples=60, test_samples=80)
    tasks, settings = benchmark.stream(1), RunConfig.make("pmnist", "er").method_settings
    learner = steppe.Learner(benchmark.model(1), settings, seed=1)
    assert result.untrained == learner.evaluate(tasks)
    ahead = []
    for place, task in enumerate(tasks):
        ahead += learner.evaluate(task) if place else []
        learner.learn(task, epochs=1, batch_size=10, updates_per_batch=5)
    assert result.ahead == ahead
    expected = sum(found - chance for found, chance in zip(ahead, result.untrained[1:], strict=True)) / 2
    assert result.forward_transfer == pytest.approx(expected)
    assert f"forward transfer {expected:.2f}" in summary(result)


@pytest.mark.parametrize("method", ["multitask", "oracle"])
def test_joint_training_has_no_forward_transfer(method: str) -> None:
    changes = ["benchmark.tasks=2", "benchmark.samples=20", "benchmark.test_samples=20"]
    result = run(RunConfig.make("pmnist", method, changes))
    assert result.forward_transfer is None
    assert result.schedule != "sequential"
    assert "forward transfer" not in summary(result)


def test_published_results_appear_only_for_the_papers_settings() -> None:
    file = Path(__file__).parents[2] / "results" / "pmnist" / "er" / "seed-0" / "result.json"
    own = RunResult.from_dict(json.loads(file.read_text(encoding="utf-8")))
    assert "paper (5 seeds): ACC 68.31" in summary(own)
    assert "68.31" in markdown([own])
    changed = replace(own, command=f"{own.command} --set method.buffer=50")
    assert "the method's settings differ from its preset: published figures do not apply" in summary(changed)
    assert "68.31" not in summary(changed) + markdown([changed])
    quoted = replace(own, command=f"{own.command} --set 'method.thresholds=0.5, 0.6'")
    assert "68.31" not in summary(quoted) + markdown([quoted])
    shortened = replace(own, is_canonical=False)
    assert "68.31" not in summary(shortened) + markdown([shortened])


def test_published_results_from_elsewhere_are_marked() -> None:
    file = Path(__file__).parents[2] / "results" / "pmnist" / "er" / "seed-0" / "result.json"
    own = RunResult.from_dict(json.loads(file.read_text(encoding="utf-8")))
    assert "†" not in summary(own) + markdown([own])
    copied = replace(own, benchmark="tiny-imagenet")
    assert "48.32 ± 1.51†" in summary(copied)
    assert "48.32 ± 1.51†" in markdown([copied])
    assert "† The paper took this figure from another" in summary(copied)
    assert "† The paper took this figure from another" in markdown([copied])
    assert r"$48.32 \pm 1.51^\dagger$" in latex([copied])
    assert r"\footnotesize \dag{} The paper took" in latex([copied])
    assert json.loads(as_json([copied], "x"))["rows"][0]["paper"]["acc"]["note"] == [
        "† The paper took this figure from another, whose network or training differs."
    ]
    unprinted = replace(own, benchmark="cifar100-split", method="a-gem")
    assert "65.90 ± 0.71‡" in markdown([unprinted])
    assert "‡ In the source of the paper, but not in print." in markdown([unprinted])


def test_published_seeds_are_shown() -> None:
    file = Path(__file__).parents[2] / "results" / "case-study" / "pmnist-60k" / "er" / "seed-0" / "result.json"
    assert "paper: ACC 86.16\n" in summary(RunResult.from_dict(json.loads(file.read_text(encoding="utf-8"))))


def test_files_with_other_names_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("state-000007", "state-²", "state-٣", "state-x", "state-"):
        (tmp_path / "checkpoints" / f"{name}.safetensors").touch()
    assert RunDirectory(tmp_path).states == [7]
