"""`steppe search`: trials on validation data, pruning, interruptions, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="a search needs Optuna")

from steppe.cli.main import main
from steppe.experiments.config import RunConfig
from steppe.results.schema import RunResult

SMALL = ("--set", "samples=40", "--set", "test_samples=60", "--jobs", "1")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trials(out: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(out, "trials.json").read_text(encoding="utf-8"))["trials"]
    return found


def test_it_ends_with_a_configuration_a_table_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "pmnist", "er", "--trials", "6", "--tasks", "2", *SMALL, "--out", "s"]) == 0
    out = capsys.readouterr().out
    assert "steppe run --config s/best.toml" in out
    found = trials("s")
    assert len(found) == 6
    assert found[0]["values"] == {"lr": 0.005}  # the preset comes first
    best = max(found, key=lambda trial: trial["score"])
    config = RunConfig.load(Path("s/best.toml"))
    assert config.method_settings.as_dict()["lr"] == best["values"]["lr"]
    assert (config.report, config.skip_tasks) == ("test", 0)
    for trial in found:
        assert 1e-3 <= trial["values"]["lr"] <= 0.3
        result = RunResult.from_dict(json.loads(Path(f"s/trials/{trial['number']:04d}/result.json").read_text("utf-8")))
        assert result.on_validation
        assert result.acc == trial["score"]
        assert not list(Path(f"s/trials/{trial['number']:04d}/checkpoints").iterdir())
    pytest.importorskip("matplotlib")
    assert all(Path(f"s/search.{suffix}").stat().st_size > 1000 for suffix in ("pdf", "svg", "png"))
    assert main(["run", "--config", "s/best.toml", "--out", "best"]) == 0
    assert not RunResult.from_dict(json.loads(Path("best/result.json").read_text("utf-8"))).on_validation


def test_no_trial_touches_test_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test images are replaced by ones whose labels are wrong: nothing in the search changes."""
    import torch

    from steppe.tuning.plan import SearchPlan
    from steppe.tuning.space import build_space

    config = RunConfig.make("pmnist", "er", ["tasks=2", "samples=30", "test_samples=50"])
    plan = SearchPlan(config, build_space(config.method_settings, config.method_settings.search_space(), {}), 1)
    validated = plan.trial_config({}).tasks()
    for task, own in zip(validated, config.tasks(), strict=True):
        assert task.test is not None
        assert own.test is not None
        x, _ = next(iter(task.test.batches(50, None)))
        test_x, _ = next(iter(own.test.batches(50, None)))
        assert not torch.equal(x, test_x)


def test_chosen_on_the_first_tasks_and_run_on_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["search", "pmnist", "er", "--trials", "2", "--tasks", "4", "--choose-on", "3", *SMALL, "--out", "s"]
    assert main(command) == 0
    assert "on the first 3" in capsys.readouterr().out
    assert [trial["scores"].keys() for trial in trials("s")] == [{"1", "2", "3"}] * 2
    assert json.loads(Path("s/trials.json").read_text("utf-8"))["choose_on"] == 3
    assert main(["run", "--config", "s/best.toml", "--out", "rest"]) == 0
    result = json.loads(Path("rest/result.json").read_text("utf-8"))
    assert result["config"]["run"]["skip_tasks"] == 3
    assert len(result["accuracy"]) == 1
    assert "--skip-tasks 3" in result["command"]
    assert main([*command[:-1], "other", "--choose-on", "4"]) == 2
    assert "no task is left of 4" in capsys.readouterr().err


def test_trials_that_fall_behind_are_ended_after_a_task() -> None:
    command = ["search", "pmnist", "er", "--trials", "14", "--tasks", "3", "--search-seed", "1", *SMALL]
    assert main([*command, "--out", "s"]) == 0
    found = trials("s")
    pruned = [trial for trial in found if trial["state"] == "pruned"]
    assert pruned
    for trial in pruned:
        assert max(map(int, trial["scores"])) == 2  # not before the second task, and never after the last
        earlier = sorted(
            other["scores"]["2"]
            for other in found
            if other["state"] == "complete" and other["number"] < trial["number"]
        )
        assert len(earlier) >= 5
        assert trial["scores"]["2"] < (earlier[(len(earlier) - 1) // 2] + earlier[len(earlier) // 2]) / 2
    assert main([*command, "--no-pruning", "--out", "whole"]) == 0
    assert {trial["state"] for trial in trials("whole")} == {"complete"}


@pytest.mark.parametrize("lines", [3, 17, 40])
def test_a_killed_search_makes_the_same_trials(lines: int) -> None:
    """Killed when its journal has this many lines: within the first trial, a later one, and one of the last."""
    command = ["search", "pmnist", "er", "--trials", "8", "--tasks", "3", *SMALL, "--checkpoint-every", "0", "--out"]
    assert main([*command, "whole"]) == 0
    words = [sys.executable, "-m", "steppe", *command, "killed"]
    with subprocess.Popen(
        words, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        journal = Path("killed/journal.log")
        while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert not Path("killed/trials.json").exists()
    with journal.open("ab") as file:
        file.write(b'{"op_code":5,"worker')  # as if killed while writing
    until = time.monotonic() + 20
    while (code := main([*command, "killed", "--resume"])) == 2 and time.monotonic() < until:
        time.sleep(0.1)  # a killed worker may hold the directory's lock for a moment
    assert code == 0
    assert trials("killed") == trials("whole")
    assert Path("killed/best.toml").read_text("utf-8") == Path("whole/best.toml").read_text("utf-8")


def test_more_trials_and_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["search", "pmnist", "finetune", "--tasks", "2", *SMALL, "--out", "s"]
    assert main([*command, "--trials", "2"]) == 0
    before = trials("s")
    assert main([*command, "--trials", "4"]) == 2
    assert "already contains a search; pass --resume" in capsys.readouterr().err
    assert main([*command, "--trials", "4", "--resume"]) == 0
    assert len(trials("s")) == 4
    assert trials("s")[:2] == before
    assert main(["resume", "s"]) == 0
    assert len(trials("s")) == 4
    assert main([*command, "--trials", "4", "--resume", "--space", "momentum=0:0.9"]) == 2
    assert "different settings" in capsys.readouterr().err


def test_several_jobs() -> None:
    command = ["search", "pmnist", "er", "--trials", "5", "--tasks", "2", *SMALL[:-1], "2", "--out", "s"]
    assert main(command) == 0
    assert [trial["state"] for trial in trials("s")] == ["complete"] * 5
    assert len({trial["values"]["lr"] for trial in trials("s")}) == 5


def test_a_trial_that_diverges_is_no_failure() -> None:
    extreme = ["--space", "lr=0.005,1e30", "--set", "clip=0"]
    assert main(["search", "pmnist", "er", "--trials", "4", "--tasks", "2", *SMALL, *extreme, "--out", "s"]) == 0
    ended = {trial["values"]["lr"]: (trial["state"], trial["note"]) for trial in trials("s")}
    assert ended[0.005] == ("complete", "")
    assert ended[1e30] == ("pruned", "diverged")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space", "lrr=1:2"], "Did you mean 'lr'"),
        (["--space", "lr=0.1:0.01"], "the smaller one first"),
        (["--space", "lr=-1:1"], "lr = -1.0 is out of range"),
        (["--space", "lr=0:1:log"], "two numbers above 0"),
        (["--space", "lr=0.1:1:linear"], "expected KEY=LOW:HIGH"),
        (["--only", "buffer"], "unknown setting to search 'buffer'"),
        (["--trials", "0"], "--trials must be between 1 and"),
        (["--report", "validation"], "leave out --report"),
        (["--choose-on", "0"], "--choose-on must be at least 1"),
    ],
)
def test_invalid_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "pmnist", "er", *SMALL, *arguments, "--out", "s"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("s").exists()


def test_what_defines_a_method_is_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "pmnist", "fs-gpm", *SMALL, "--space", "importance=ones,sigmoid", "--out", "s"]) == 2
    assert "importance defines fs-gpm" in capsys.readouterr().err


def test_damaged_files(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["search", "pmnist", "finetune", "--trials", "1", "--tasks", "2", *SMALL, "--out", "s"]
    assert main(command) == 0
    journal = Path("s/journal.log")
    journal.write_bytes(b"[1]\n" + journal.read_bytes())
    assert main(["resume", "s"]) == 1
    assert "cannot read s/journal.log as a journal" in capsys.readouterr().err
    Path("s/search.json").write_text('{"trials": "many"}', encoding="utf-8")
    assert main(["resume", "s"]) == 1
    assert "cannot read s/search.json as a search" in capsys.readouterr().err
