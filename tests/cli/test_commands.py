"""The command line: output, errors, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steppe.cli.main import main
from steppe.registry import METHODS

SHORT = ["--set", "tasks=2", "--set", "samples=50", "--set", "test_samples=100"]


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_internal_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With --debug the traceback is printed too."""

    def faulty(name: str) -> None:
        raise LookupError(f"{name}\nis not there")

    monkeypatch.setattr("steppe.experiments.config.find_method", faulty)
    assert main(["run", "pmnist", "er"]) == 1
    told = "steppe: internal error: LookupError: er is not there; rerun with --debug for the traceback.\n"
    assert capsys.readouterr().err == told
    assert main(["run", "pmnist", "er", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main(["--debug", "run", "pmnist", "er"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "in faulty" in shown
    assert shown.endswith(told)


@pytest.mark.parametrize(
    ("error", "told"),
    [(PermissionError(13, "no", "a/b"), "a/b: permission denied"), (MemoryError(), "out of memory")],
)
def test_system_errors(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(name: str) -> None:
        raise error

    monkeypatch.setattr("steppe.experiments.config.find_method", refused)
    assert main(["run", "pmnist", "er"]) == 1
    assert told in capsys.readouterr().err


def test_run_show_and_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "pmnist", "fs-dgpm", *SHORT]) == 0
    captured = capsys.readouterr()
    result = json.loads(Path("runs/pmnist-fs-dgpm-seed0/result.json").read_text(encoding="utf-8"))
    assert f"ACC {result['acc']:.2f}" in captured.out
    assert "task 2/2" in captured.err
    assert main(["show", "runs/pmnist-fs-dgpm-seed0"]) == 0
    assert f"BWT {result['bwt']:.2f}" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main(["figures", "forgetting", "runs/pmnist-fs-dgpm-seed0", "-o", "f.png"]) == 0
    assert Path("f.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["figures", "forgetting", "runs/pmnist-fs-dgpm-seed0", "-o", "f.txt"]) == 2


def test_default_directories_are_new_and_given_ones_are_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["run", "pmnist", "finetune", *SHORT]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "pmnist-finetune-seed0",
        "pmnist-finetune-seed0-2",
    ]
    assert main(["run", "pmnist", "finetune", *SHORT, "--out", "runs/pmnist-finetune-seed0"]) == 2
    assert "already contains a run" in capsys.readouterr().err


def test_a_study_keeps_its_plan_and_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is requested in its directory: other settings, fewer methods, another study, a run."""
    study = ["study", "pmnist", "finetune", "er", *SHORT, "--seeds", "1", "--out", "s"]
    assert main(study) == 0
    kept = {path: path.read_bytes() for path in Path("s").rglob("*") if path.is_file()}
    refused = {
        "s/finetune/seed-0 contains a run with different settings": [*study, "--resume", "--set", "lr=0.5"],
        "that also includes finetune/seed-0": [*study[:2], *study[3:], "--resume"],
        "s already contains a study (study.json)": ["study", "pmnist", "gpm", *SHORT, "--out", "s"],
        "s already contains a study": ["run", "pmnist", "gpm", *SHORT, "--out", "s"],
        "already contains a study (study.json)": ["run", "pmnist", "gpm", *SHORT, "--out", "s", "--resume"],
        "s/er/seed-0 already contains a run": ["study", "pmnist", "gpm", *SHORT, "--out", "s/er/seed-0"],
    }
    capsys.readouterr()
    for told, command in refused.items():
        assert main(command) == 2
        assert told in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("s").rglob("*") if path.is_file()} == kept
    assert main([*study[:4], "gpm", *study[4:], "--resume"]) == 0  # one more
    shutil.rmtree("s/gpm/seed-0")  # planned, but it does not exist: it may be left out
    assert main([*study, "--resume"]) == 0
    assert main([*study[:4], "gpm", *study[4:], "--resume"]) == 0
    assert main(["resume", "s"]) == 0
    assert [row["method"] for row in json.loads(Path("s/table.json").read_bytes())["rows"]] == ["finetune", "er", "gpm"]


@pytest.mark.parametrize("name", ["report.md", "report.html", "log.jsonl", "checkpoints"])
@pytest.mark.parametrize("option", [[], ["--resume"]])
def test_existing_files_are_not_overwritten(name: str, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    (Path("mine") / name).write_text("mine", encoding="utf-8")
    assert main(["run", "pmnist", "finetune", *SHORT, "--out", "mine", *option]) == 2
    assert f"{Path('mine') / name} would be overwritten" in capsys.readouterr().err
    assert (Path("mine") / name).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("option", [[], ["--resume"]])
def test_existing_tables_are_not_overwritten(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/table.tex").write_text("mine", encoding="utf-8")
    assert main(["study", "pmnist", "finetune", *SHORT, "--seeds", "1", "--out", "mine", *option]) == 2
    assert "table.tex would be overwritten" in capsys.readouterr().err
    assert list(Path("mine").glob("finetune")) == []


def test_a_missing_report_is_written_on_resume() -> None:
    """For a run that was killed between writing its result and its report."""
    assert main(["study", "pmnist", "finetune", *SHORT, "--seeds", "1", "--out", "s"]) == 0
    run = Path("s/finetune/seed-0")
    report = (run / "report.md").read_text(encoding="utf-8")
    for late in ("report.md", "checkpoints/state-000002.safetensors"):
        (run / "report.md").unlink()
        if late != "report.md":
            (run / "report.md").write_text(report, encoding="utf-8")
            (run / late).write_bytes(b"left over")
        assert main(["resume", "s"]) == 0
        assert (run / "report.md").read_text(encoding="utf-8") == report
        assert list(run.glob("checkpoints/state-*")) == []


def test_study_writes_tables_and_matches_single_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "pmnist", "er", "finetune", "--seeds", "2", "--jobs", "2", *SHORT, "--out", "s"]) == 0
    out = capsys.readouterr().out
    table = json.loads(Path("s/table.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in table["rows"]] == ["er", "finetune"]
    assert table["rows"][0]["seeds"] == [0, 1]
    assert "| er | 2 |" in out
    assert r"\begin{tabular}" in Path("s/table.tex").read_text(encoding="utf-8")
    assert main(["run", "pmnist", "er", "--seed", "1", *SHORT, "--out", "alone"]) == 0
    alone = json.loads(Path("alone/result.json").read_text(encoding="utf-8"))
    within = json.loads(Path("s/er/seed-1/result.json").read_text(encoding="utf-8"))
    timeless = dict.fromkeys(("seconds", "cpu_seconds", "per_task"), 0)
    assert {**alone, **timeless} == {**within, **timeless}
    capsys.readouterr()
    assert main(["show", "s"]) == 0
    assert "| finetune | 2 |" in capsys.readouterr().out
    assert main(["study", "pmnist", "er", "--seeds", "1", *SHORT, "--out", "s"]) == 2


def test_a_study_reports_on_validation_data(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", "pmnist", "er", "--seeds", "1", "--jobs", "1", *SHORT]
    assert main([*command, "--report", "validation", "--out", "v"]) == 0
    assert main([*command, "--out", "t"]) == 0
    capsys.readouterr()
    results = [json.loads(Path(f"{out}/er/seed-0/result.json").read_text(encoding="utf-8")) for out in "vt"]
    assert results[0]["accuracy"] != results[1]["accuracy"]
    assert results[0]["updates"] == results[1]["updates"]
    assert main(["show", "v"]) == 0
    out = capsys.readouterr().out
    assert "| validation ACC |" in out
    assert "on validation data" in out
    assert "validation data" in Path("v/table.tex").read_text(encoding="utf-8")
    assert "validation data" in Path("v/report.html").read_text(encoding="utf-8")
    assert json.loads(Path("v/table.json").read_text(encoding="utf-8"))["report"] == "validation"
    assert "validation" not in Path("t/table.md").read_text(encoding="utf-8")
    assert main(["report", "v", "t", "-o", "both.html"]) == 0
    both = Path("both.html").read_text(encoding="utf-8")
    assert "pmnist (report=validation)" in both
    assert "pmnist (report=test)" in both


def test_a_range_of_seeds() -> None:
    assert main(["run", "pmnist", "finetune", "--seeds", "7-8", "--jobs", "1", *SHORT]) == 0
    table = json.loads(Path("runs/pmnist-finetune-seeds7-8/table.json").read_text(encoding="utf-8"))
    assert table["rows"][0]["seeds"] == [7, 8]
    assert "--seeds 7-8" in table["command"]


def test_a_study_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", "pmnist", "finetune", "--seeds", "2", "--jobs", "1", *SHORT, "--out", "s"]
    assert main(command) == 0
    kept = Path("s/finetune/seed-0/result.json")
    before, wanted = kept.stat().st_mtime_ns, json.loads(Path("s/table.json").read_text(encoding="utf-8"))
    Path("s/finetune/seed-1/result.json").unlink()  # as if the run had been killed
    assert main(command) == 2
    assert main([*command, "--resume", "--set", "lr=0.5"]) == 2
    assert "different settings" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert kept.stat().st_mtime_ns == before
    found = json.loads(Path("s/table.json").read_text(encoding="utf-8"))
    assert [row["acc"] for row in found["rows"]] == [row["acc"] for row in wanted["rows"]]


def test_a_failing_run_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "failing.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "import steppe\n"
        "@dataclass(frozen=True)\n"
        "class Failing(steppe.Finetune):\n"
        "    'A class that only the plugin knows.'\n"
        "steppe.register_method('failing', Failing, 'diverges', variant={'lr': 1e30, 'clip': 0})\n",
        encoding="utf-8",
    )
    try:
        code = main(
            ["study", "pmnist", "failing", "finetune", "--seeds", "1", "--plugin", str(plugin), *SHORT, "--out", "s"]
        )
    finally:
        METHODS.pop("failing", None)
    captured = capsys.readouterr()
    assert code == 1
    assert "failing seed 0 failed: the loss became" in captured.err
    assert "| finetune | 1 |" in captured.out


@pytest.mark.parametrize(("sent_signal", "told"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
@pytest.mark.parametrize("words", ["run pmnist fs-dgpm", "study pmnist fs-dgpm --seeds 1"])
def test_interrupted_runs_save_a_checkpoint(
    words: str, sent_signal: signal.Signals, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "steppe", *words.split(), "--out", "stopped runs/one"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background tests inherit it ignored
    )
    deadline = time.monotonic() + 60
    while not list(Path("stopped runs").rglob("log.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(sent_signal)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + sent_signal
    assert f"steppe: interrupted by {told}; resume with: steppe resume 'stopped runs/one'\n" in err
    assert "Traceback" not in err
    assert "Warning" not in err
    (log,) = Path("stopped runs").rglob("log.jsonl")
    assert json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["event"] == "Stopped"
    assert list(log.parent.glob("checkpoints/state-*.safetensors")), "five minutes would have been lost"
    assert not list(Path("stopped runs").rglob("*.part"))
    assert main(["show", "stopped runs"]) == 2
    assert "only unfinished runs (1)" in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, "fs-dgpm", "er", "pmnist"])
def test_list(name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *([name] if name else [])]) == 0
    out = capsys.readouterr().out
    for word in {
        None: [*METHODS, "pmnist"],
        "fs-dgpm": ["threshold_step = 0.0005", "cifar100-split: ascent_lr=0.001", "76.96 ± 0.51"],
        "er": ["pmnist: lr=0.005"],
        "pmnist": ["tasks = 20", "updates_per_batch = 5", "fs-sgpm"],
    }[name]:
        assert word in out


@pytest.mark.parametrize("command", ["run", "study", "list", "show", "figures"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert command == "list" or "examples:" in out


def test_characters_the_terminal_cannot_show() -> None:
    """Some terminals cannot show λ or a minus sign."""
    found = subprocess.run(
        [sys.executable, "-m", "steppe", "list", "fs-dgpm"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert found.returncode == 0, found.stderr
    assert b"?" in found.stdout
    assert b"importance_lr" in found.stdout


def test_a_closed_pipe_gives_no_traceback() -> None:
    command = f"{sys.executable} -m steppe list fs-dgpm | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=os.environ, check=False)
    assert "Traceback" not in done.stderr


STOPPED = {
    "reproduce --list": ("reproduce._list", "run the same command again to resume."),
    "landscape .": ("landscape._find_runs", "run the same command with --resume to resume."),
    "run pmnist er": ("run.set_data_directory", "the same command starts over"),
    "figures --list": ("figures._describe_figure", "the same command starts over"),
}


@pytest.mark.parametrize("words", STOPPED)
def test_ctrl_c_says_how_to_resume(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, told = STOPPED[words]

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"steppe.cli.{place}", interrupt)
    assert main(words.split()) == 130
    assert f"interrupted by Ctrl-C; {told}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "told", ["CUDA out of memory. Tried to allocate 9 GiB", "DefaultCPUAllocator: can't allocate memory"]
)
def test_out_of_memory_in_torch(told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError(told)

    monkeypatch.setattr("steppe.cli.run.set_data_directory", fail)
    assert main(["run", "pmnist", "er"]) == 1
    assert "out of memory; use smaller tasks, batches or buffers." in capsys.readouterr().err
