"""CPU seconds beside wall-clock seconds, in results and everything computed from them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from made_runs import made_result, write_run

import steppe
from steppe.checkpoint.io import read_state, write_state
from steppe.experiments import run_directory as run_files
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.report.finished_run import collect, training_times
from steppe.report.sections import build_sections
from steppe.report.series import section_series
from steppe.results.detailed_table import details
from steppe.results.schema import RunResult
from steppe.results.tables import as_json, common_time_measure, markdown, rows, summary
from steppe.runtime.clocks import Elapsed, Stopwatch, split_wall_cpu

SMALL = ["tasks=2", "samples=20", "test_samples=20"]
CPU = {"train": 1.0, "evaluate": 10.0, "memory": 0.5}


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def test_sleeping_takes_no_cpu_time(one_thread: None) -> None:
    clock = Stopwatch()
    time.sleep(0.2)
    wall, cpu = clock.elapsed
    assert wall >= 0.2
    assert cpu is not None
    assert cpu < 0.1


def test_work_of_other_threads_is_not_counted(one_thread: None) -> None:
    """With one torch thread, all of a run's work is in the thread that it was started in."""
    clock = Stopwatch()
    other = threading.Thread(target=busy, args=(0.3,))
    other.start()
    other.join()
    assert (clock.elapsed.cpu or 0) < 0.15
    busy(0.2)
    assert (clock.elapsed.cpu or 0) >= 0.2


def test_with_several_torch_threads_the_whole_process_counts(one_thread: None) -> None:
    torch.set_num_threads(2)
    clock = Stopwatch()
    other = threading.Thread(target=busy, args=(0.2,))
    other.start()
    other.join()
    assert (clock.elapsed.cpu or 0) >= 0.2


def test_unrecorded_times_stay_unknown() -> None:
    assert Stopwatch(Elapsed(5.0, None)).elapsed.cpu is None
    assert split_wall_cpu({"train": Elapsed(2.0, 1.0), "memory": Elapsed(3.0, None)}) == (
        {"train": 2.0, "memory": 3.0},
        {},
    )
    assert split_wall_cpu({"train": Elapsed(2.0, 1.0)}) == ({"train": 2.0}, {"train": 1.0})


def test_runs_record_both_times(tmp_path: Path) -> None:
    result = run(RunConfig.make("pmnist", "gpm", SMALL), tmp_path / "run")
    assert result == RunResult.from_dict(json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8")))
    kinds = {"train", "evaluate", "memory"}
    assert result.cpu_seconds is not None
    assert result.cpu_seconds.keys() == result.seconds.keys() == kinds
    assert all(value > 0 for value in result.cpu_seconds.values())
    assert all(stage.cpu_seconds and stage.cpu_seconds.keys() == kinds for stage in result.per_task)
    for kind in kinds:
        total = sum((stage.cpu_seconds or {})[kind] for stage in result.per_task)
        assert total == pytest.approx(result.cpu_seconds[kind])
    ended = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["cpu_seconds"].keys() for event in ended if event["event"] == "TaskEnded"] == [kinds] * 2


def test_resumed_run_of_an_older_version_has_only_wall_clock_time(tmp_path: Path) -> None:
    config, out = RunConfig.make("pmnist", "er", SMALL), tmp_path / "run"

    def stop(event: steppe.api.Event) -> None:
        if isinstance(event, steppe.EpochEnded) and event.task == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, out, stop, checkpoint_every=0)
    number = run_files.RunDirectory(out).states[-1]
    file = out / "checkpoints" / f"state-{number:06d}.safetensors"
    state = read_state(file, "run")
    for task in state["per_task"]:
        del task["cpu_seconds"]
    if state["learner"]["fitting"]:
        del state["learner"]["fitting"]["cpu_seconds"]
    write_state(file, "run", state)
    result = run(config, out, resume=True)
    assert result.cpu_seconds is result.per_task[0].cpu_seconds is None
    assert "cpu_seconds" not in result.as_dict()
    assert result.seconds.keys() == {"train", "evaluate", "memory"}


@pytest.mark.parametrize("wrong", [5, {}, {**CPU, "train": "1"}, {"train": 1.0}])
def test_results_with_invalid_times_are_rejected(wrong: object) -> None:
    with pytest.raises(ValueError, match="'cpu_seconds'"):
        RunResult.from_dict({**made_result(), "cpu_seconds": wrong})


def test_tables_and_figures_use_cpu_time_if_all_runs_have_it(tmp_path: Path) -> None:
    made = [write_run(tmp_path / "all" / "old", made_result("er"))]
    made.append(write_run(tmp_path / "all" / "new", {**made_result("gpm"), "cpu_seconds": CPU}))
    old, new = (each.result for each in made)
    assert common_time_measure([new]) == "cpu_seconds"
    assert common_time_measure([old, new]) == "seconds"
    assert "CPU seconds per run" in markdown([new])
    assert "; seconds per run" in markdown([old, new])
    assert rows([new])[0].seconds.mean == 11.5  # type: ignore[union-attr]
    assert [row.seconds.mean for row in rows([old, new])] == [106.0, 106.0]  # type: ignore[union-attr]
    assert json.loads(as_json([new], ""))["timed_by"] == "cpu_seconds"
    assert "106 s, 12 CPU s (training 3" in summary(new)
    assert "CPU" not in summary(old)
    assert training_times(made[1:]) == ({made[1].path: 0.5}, "CPU seconds")
    assert training_times(made) == (dict.fromkeys([each.path for each in made], 2.0), "seconds")
    assert "training CPU time without testing" in details({made[1].path: new})
    assert "training time without testing" in details({each.path: each.result for each in made})


def test_report_uses_cpu_time_if_all_runs_have_it(tmp_path: Path) -> None:
    for name, result in {"old": made_result("er"), "new": {**made_result("gpm"), "cpu_seconds": CPU}}.items():
        write_run(tmp_path / "both" / name, result)
    write_run(tmp_path / "new", {**made_result("gpm"), "cpu_seconds": CPU})
    for place, measure, train in (("both", "seconds", 1.0), ("new", "cpu_seconds", round(1 / 3, 5))):
        [section] = build_sections(collect([tmp_path / place]))
        series = section_series(section)
        assert series["timed_by"] == measure
        assert [method["seconds"]["all"][0] for method in series["methods"]] == [train] * len(section.variants)


def test_cpu_time_is_not_used_for_gpu_runs() -> None:
    result = {**made_result(), "cpu_seconds": CPU}
    result["config"]["run"]["device"] = "cuda"
    assert common_time_measure([RunResult.from_dict(result)]) == "seconds"


def test_learn_returns_both_times() -> None:
    learnt = steppe.Learner(torch.nn.Linear(6, 4), steppe.ER()).learn(
        steppe.Task((torch.rand(20, 6), torch.arange(20) % 4))
    )
    assert learnt.cpu_seconds.keys() == learnt.seconds.keys() == {"train", "memory"}
