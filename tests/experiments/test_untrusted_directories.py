"""Untrusted directories: whatever is done with them, none of their code runs, nothing is written outside them, and
nothing blocks on a pipe or exhausts the memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_runs import made_result, write_run

import steppe
from steppe.cli.main import main
from steppe.errors import UsageError
from steppe.experiments import plugins
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.learning.events import TaskEnded
from steppe.registry import METHODS
from steppe.results.layout import RESULT

SHORT = ["--set", "benchmark.samples=20", "--set", "benchmark.test_samples=20", "--tasks", "2"]
CODE = "import pathlib, steppe\npathlib.Path(__file__).with_name('ran').touch()\n"
CODE += "steppe.register_method('theirs', steppe.Finetune, 'theirs')\n"
LOOK = ["--samples", "10", "--directions", "1", "--points", "11"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and a study, both with a plugin."""
    place = tmp_path_factory.mktemp("made")
    (place / "theirs.py").write_text(CODE, encoding="utf-8")
    named = ["--plugin", str(place / "theirs.py")]
    try:
        assert main(["run", "pmnist", "theirs", *SHORT, *named, "--out", str(place / "r")]) == 0
        study = ["study", "pmnist", "theirs", "--seeds", "2", "--jobs", "2", *SHORT, *named, "--out"]
        assert main([*study, str(place / "s")]) == 0
    finally:
        _forget()
    return place


@pytest.fixture
def world(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy, as if unpacked from an archive, in a process that has not imported the plugin."""
    place = tmp_path / "world"
    shutil.copytree(made, place)
    for file in [*place.rglob("config.toml"), *place.rglob("*.json")]:
        file.write_text(file.read_text(encoding="utf-8").replace(str(made), str(place)), encoding="utf-8")
    (place / "ran").unlink()
    monkeypatch.chdir(place)
    yield place
    _forget()


def _forget() -> None:
    METHODS.pop("theirs", None)
    plugins._DIGESTS.clear()


UNFINISHED = {
    "resume a run": ["resume", "r"],
    "resume a study": ["resume", "s"],
    "resume a run with fewer tasks": ["resume", "r", "--tasks", "1"],
    "a landscape": ["landscape", "r", *LOOK],
    "landscapes of a study": ["landscape", "s", *LOOK],
    "a run's configuration": ["run", "--config", "r/config.toml", "--out", "again"],
    "the same command, a run": ["run", "pmnist", "finetune", *SHORT, "--resume", "--out", "r"],
    "the same command, a study": ["study", "pmnist", "finetune", "--seeds", "2", *SHORT, "--resume", "--out", "s"],
}


def _unfinished(place: Path) -> None:
    for result in place.rglob(RESULT):
        result.unlink()


@pytest.mark.parametrize("case", UNFINISHED)
def test_unnamed_plugins_do_not_run(case: str, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _unfinished(world)
    assert main(UNFINISHED[case]) == 2
    told = capsys.readouterr().err
    assert not (world / "ran").exists()
    assert told.count("\n") == 1
    if not case.endswith("study") or "command" not in case:
        assert f"this needs the plugin {world}/theirs.py. Plugins are Python code" in told
        assert f"pass --plugin {world}/theirs.py, or --trust-plugins" in told


@pytest.mark.parametrize("case", ["the same command, a run", "the same command, a study"])
def test_unnamed_plugins_do_not_run_for_finished_runs(case: str, world: Path) -> None:
    main(UNFINISHED[case])
    assert not (world / "ran").exists()


@pytest.mark.parametrize("words", [["show"], ["show", "--details"], ["report"], ["figures", "matrix"]])
@pytest.mark.parametrize("place", ["r", "s"])
def test_unnamed_plugins_do_not_run_to_show_results(words: list[str], place: str, world: Path) -> None:
    shutil.copy(world / "r" / RESULT, world / RESULT)
    assert main([*words, place]) in (0, 2)
    assert not (world / "ran").exists()


@pytest.mark.parametrize("trust", [["--plugin", "theirs.py"], ["--trust-plugins"]])
@pytest.mark.parametrize(
    "case", ["resume a run", "resume a study", "a landscape", "landscapes of a study", "a run's configuration"]
)
def test_named_or_trusted_plugins_run(case: str, trust: list[str], world: Path) -> None:
    if "resume" in case:
        _unfinished(world)
    assert main([*UNFINISHED[case], *trust]) == 0
    assert (world / "ran").exists()


def test_the_library_does_not_run_unnamed_plugins(world: Path) -> None:
    config = world / "r" / "config.toml"
    with pytest.raises(UsageError, match="this needs the plugin"):
        RunConfig.load(config)
    assert not (world / "ran").exists()
    assert RunConfig.load(config, [str(world / "theirs.py")]).method == "theirs"


def test_the_users_plugin_replaces_one_of_the_same_name(world: Path, tmp_path: Path) -> None:
    _unfinished(world)
    (tmp_path / "theirs.py").write_text(CODE, encoding="utf-8")
    assert main(["resume", "r", "--plugin", str(tmp_path / "theirs.py")]) == 0
    assert (tmp_path / "ran").exists()
    assert not (world / "ran").exists()


def test_workers_do_not_import_from_the_working_directory(tmp_path: Path) -> None:
    """Workers are started as `python -c`, which would search the working directory first."""
    place = tmp_path / "theirs"
    place.mkdir()
    for name in ("multiprocessing", "torch", "steppe"):
        (place / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit\n", encoding="utf-8")
    script = "import sys; from steppe.cli.main import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "script.py").write_text(f"if __name__ == '__main__':\n    {script}\n", encoding="utf-8")
    words = ["study", "pmnist", "finetune", "--seeds", "1", *SHORT, "--out", "s"]
    source = str(Path(steppe.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *words],
        cwd=place, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not (place / "ran").exists(), done.stderr
    assert done.returncode == 0, done.stderr


WRITTEN = ["config.toml", "log.jsonl", "result.json", "report.md", "report.html", "checkpoints", ".lock"]
WRITTEN += ["checkpoints/task-001.safetensors", "checkpoints/state-000001.safetensors"]
OF_A_STUDY = [
    "table.md",
    "table.tex",
    "table.json",
    "report.html",
    "study.json",
    ".lock",
    "finetune",
    "finetune/seed-0",
]
DRAFTS = [".config.toml.part", ".result.json.part", ".report.html.part", "checkpoints/.task-001.safetensors.part"]
RUN = ["run", "pmnist", "finetune", *SHORT, "--resume", "--out", "d"]
STUDY = ["study", "pmnist", "finetune", "--seeds", "1", *SHORT, "--resume", "--out", "d"]


def _begun(command: list[str]) -> None:
    assert main(command) == 0
    _unfinished(Path("d"))


def _linked(name: str, target: Path) -> None:
    (Path("d") / name).symlink_to(target)


def _held(place: Path) -> dict[Path, object]:
    return {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("command", "name"), [(RUN, name) for name in WRITTEN] + [(STUDY, name) for name in OF_A_STUDY]
)
def test_links_out_of_the_directory_are_not_followed(
    command: list[str],
    name: str,
    there: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The link's target exists outside the directory, or does not exist."""
    (tmp_path / "work").mkdir()
    (tmp_path / "user").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    _begun(command)
    file, target = Path("d") / name, tmp_path / "user" / "thing"
    if file.exists():
        file.rename(target)
    else:
        target.write_bytes(b"precious")
    if target.is_dir():
        (target / ".x.part").write_bytes(b"precious")
        (target / "state-000007.safetensors").write_bytes(b"precious")
    if not there:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    _linked(name, target)
    before = _held(tmp_path / "user")
    capsys.readouterr()
    assert main(command) in (1, 2)
    assert _held(tmp_path / "user") == before
    assert file.is_symlink()
    told = capsys.readouterr().err
    assert re.search(rf"d/{name}(/\S+)? leads out of d", told) or (
        name == "config.toml" and not there
    )  # then it is not a run


def test_links_out_of_the_directory_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _begun(RUN)
    (tmp_path / "d" / "report.html").unlink()
    _linked("report.html", tmp_path / "precious")
    assert main(RUN) in (1, 2)
    told = capsys.readouterr().err
    assert f"d/report.html leads out of d, to {tmp_path}/precious; remove that link" in told


@pytest.mark.parametrize("pipe", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_links_named_like_temporary_files_are_not_followed(
    name: str, pipe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_bytes(b"precious")
    _begun(RUN)
    _linked(name, tmp_path / "precious")
    if pipe:
        (tmp_path / "d" / name).unlink()
        os.mkfifo(tmp_path / "d" / name)
    with _TimeLimit(60):
        assert main(RUN) == 0
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_landscape_does_not_follow_links_out(world: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    (world / "r" / "landscape.json").symlink_to(target)
    assert main(["landscape", "r", *LOOK, "--plugin", "theirs.py"]) == 1
    assert not target.exists()


@pytest.mark.parametrize(("words", "name"), [(["report"], "report.html"), (["figures", "matrix"], "matrix.svg")])
def test_default_outputs_do_not_follow_links_out(words: list[str], name: str, world: Path, tmp_path: Path) -> None:
    if words[0] == "figures":
        pytest.importorskip("matplotlib")
    target = tmp_path / "precious"
    (world / name).symlink_to(target)
    assert main([*words, "r"]) == 1
    assert not target.exists()
    assert main([*words, "r", "-o", name]) == 0  # the user's own choice
    assert target.exists()


def test_control_characters_in_link_targets_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _begun(RUN)
    (tmp_path / "d" / "report.html").unlink()
    _linked("report.html", tmp_path / "\x1b[2J")
    assert main(RUN) in (1, 2)
    assert "\x1b" not in capsys.readouterr().err


def test_links_within_a_directory_and_to_it_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere" / "kept").mkdir(parents=True)
    (tmp_path / "d").symlink_to("elsewhere")
    (tmp_path / "elsewhere" / "checkpoints").symlink_to("kept")
    assert main(["run", "pmnist", "finetune", *SHORT, "--out", "d", "--resume"]) in (0, 2)


class _TimeLimit:
    """Fails by an alarm instead of waiting forever."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def late(number: int, frame: object) -> None:
            raise AssertionError("it waits for ever")

        self.before = signal.signal(signal.SIGALRM, late)
        signal.alarm(self.seconds)

    def __exit__(self, *error: object) -> None:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self.before)


PIPES: dict[str, list[str]] = {
    "r/config.toml": ["resume", "r"],
    "s/study.json": ["resume", "s"],
    "r/result.json": ["show", "r"],
    "r/log.jsonl": ["resume", "r", "--trust-plugins"],
    "r/report.html": ["resume", "r", "--trust-plugins"],
    "r/.lock": ["resume", "r", "--trust-plugins"],
    "s/.lock": ["resume", "s", "--trust-plugins"],
    "r/landscape.json": ["landscape", "r", "--trust-plugins", *LOOK],
    "r/checkpoints/task-001.safetensors": ["landscape", "r", "--trust-plugins", *LOOK],
    "theirs.py": ["resume", "r", "--trust-plugins"],
}


@pytest.mark.parametrize("name", PIPES)
def test_pipes_do_not_block(name: str, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "resume" in PIPES[name]:
        _unfinished(world)
    (world / name).unlink(missing_ok=True)
    os.mkfifo(world / name)
    with _TimeLimit(20):
        assert main(PIPES[name]) in (1, 2)
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["log.jsonl", "landscape.json"])
def test_report_ignores_pipes(name: str, world: Path) -> None:
    (world / "r" / name).unlink(missing_ok=True)
    os.mkfifo(world / "r" / name)
    with _TimeLimit(20):
        assert main(["report", "r"]) == 0


HUGE: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b"[" + b"[]," * 33_000_000 + b"0]",
    "objects": lambda: b"[" + b"{}," * 10_000_000 + b"0]",
    "texts": lambda: b"[" + b'"ab",' * 6_000_000 + b"0]",
    "depth": lambda: b"[" * 900 + b"]" * 900,
    "quotes": lambda: b'"' + b'\\"' * 1_000_000,
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_huge_result_is_rejected_at_once(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good", made_result())
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / RESULT).write_bytes(HUGE[kind]())
    (tmp_path / "bad" / "table.json").write_bytes(HUGE[kind]())
    started = time.process_time()
    assert main(["show", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert time.process_time() - started < 5
    assert "as a result: it " in capsys.readouterr().err or kind == "quotes"


def test_a_huge_log_is_ignored(tmp_path: Path) -> None:
    made = write_run(tmp_path / "r", made_result(), [{}])
    record = json.dumps({"event": "TaskEnded", "task": 0, "method": {"x": 0}}).encode()
    huge = record.replace(b"0}", b"[" + b"[]," * 400_000 + b"0]}")
    (made.path / "log.jsonl").write_bytes(b"\n".join([huge] * 20 + [record]))
    started = time.process_time()
    assert made.log.diagnostics == {0: {"x": 0}}
    assert time.process_time() - started < 2


@pytest.mark.parametrize("text", ["a." * 20_000 + "b = 1", "a = " + "{a=" * 15_000, "[" + "a." * 20_000 + "a]"])
def test_a_deeply_nested_configuration_is_rejected_at_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    started = time.process_time()
    with pytest.raises(UsageError, match="as a run configuration: it has"):
        RunConfig.load(tmp_path / "config.toml")
    assert time.process_time() - started < 1


def test_the_result_of_a_thousand_tasks_is_readable(tmp_path: Path) -> None:
    result = made_result(tasks=1000)
    result["accuracy"] = [[90.123456789012 if seen else None for seen in _seen(row)] for row in range(1000)]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / RESULT).write_text(json.dumps(result, indent=1), encoding="utf-8")
    assert main(["report", str(tmp_path / "r"), "-o", str(tmp_path / "page.html")]) == 0


def _seen(row: int) -> list[bool]:
    return [column <= row for column in range(1000)]


def test_resume_rejects_a_directory_with_links_out(tmp_path: Path) -> None:
    """A link that appears during the run is rejected too."""
    out, target = tmp_path / "d", tmp_path / "precious"
    config = RunConfig.make("pmnist", "finetune", ["benchmark.samples=20", "benchmark.test_samples=20", "tasks=2"])

    def callback(event: object) -> None:
        if isinstance(event, TaskEnded) and event.task == 0:
            (out / RESULT).symlink_to(target)

    with pytest.raises(steppe.SteppeError, match=r"result\.json leads out of"):
        run(config, out, callback)
    assert not target.exists()
