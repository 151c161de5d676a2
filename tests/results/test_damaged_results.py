"""A damaged result.json affects one run only: an error names it and the remedy, and the other runs are shown."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import report_runs
from made_runs import made_result, write_run

from steppe.cli.main import main

SHORT = ["--set", "samples=20", "--set", "test_samples=20", "--tasks", "2", "--seeds", "2", "--jobs", "1"]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of synthetic runs, one of them damaged; the current directory is its parent."""
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        report_runs.write_run(Path("s/er") / f"seed-{seed}", "er", seed)
    Path("s/er/seed-1/result.json").write_text('{"acc": 1', encoding="utf-8")
    return Path("s")


@pytest.mark.parametrize(
    "command",
    ["show s", "show s --details", "report s", "report s s/er", "figures matrix s -o m.png", "figures --list s"],
)
def test_other_runs_are_shown(command: str, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command.startswith("figures"):
        pytest.importorskip("matplotlib")
    assert main(shlex.split(command)) == 0
    told = capsys.readouterr()
    assert told.err.startswith("steppe: cannot read s/er/seed-1/result.json as a result: Expecting ',' delimiter")
    assert told.err.endswith("; remove it and run steppe resume s/er/seed-1. Skipping the run.\n")
    assert told.err.count("\n") == 1
    if command.startswith("show"):
        assert "| er | 2 |" in told.out
    if command.startswith("report"):
        page = Path("report.html").read_text(encoding="utf-8")
        assert "Left out, since their results cannot be read: s/er/seed-1." in page
        assert "unfinished" not in page


@pytest.mark.parametrize("command", ["show", "report", "figures matrix"])
def test_directory_with_only_damaged_runs_is_an_error(
    command: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "s/er/seed-1"]) == 1
    told = capsys.readouterr()
    assert told.err.endswith("; remove it and run steppe resume s/er/seed-1.\n")
    assert told.out == ""


def test_damaged_run_does_not_hide_nested_runs(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("s/er/seed-1/gpm"), made_result("gpm"))
    assert main(["show", "s/er/seed-1"]) == 0
    assert "| gpm | 1 |" in capsys.readouterr().out


def test_no_rerun_advice_without_a_configuration(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s/er/seed-1/config.toml").unlink()
    assert main(["show", "s/er/seed-1"]) == 1
    assert capsys.readouterr().err.endswith("; remove it.\n")


@pytest.mark.parametrize("whole", [True, False])
def test_advised_command_works(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the run, as the message says, and for the study."""
    monkeypatch.chdir(tmp_path)
    assert main(["study", "pmnist", "finetune", *SHORT, "--out", "s"]) == 0
    file = Path("s/finetune/seed-1/result.json")
    before = json.loads(file.read_bytes())
    file.write_bytes(file.read_bytes()[:100])
    capsys.readouterr()
    assert main(["resume", "s"]) == 1
    told = capsys.readouterr().err
    assert told.endswith("; remove it and run steppe resume s/finetune/seed-1.\n")
    file.unlink()
    assert main(["resume", "s" if whole else "s/finetune/seed-1"]) == 0
    assert main(["resume", "s"]) == 0
    assert json.loads(file.read_bytes())["accuracy"] == before["accuracy"]
    assert "| finetune | 2 |" in Path("s/table.md").read_text(encoding="utf-8")
