"""Links in untrusted directories: nothing is written through links that lead out of the directory."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from plugin_runs import LOOK, SHORT, time_limit, unfinish

import steppe
from steppe.cli.main import main
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.learning.events import TaskEnded
from steppe.results.file_names import RESULT

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
    unfinish(Path("d"))


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


@pytest.mark.parametrize(("name", "shown"), [("precious", "{}/precious"), ("\x1b[2J", "'{}/\\x1b[2J'")])
def test_links_out_of_the_directory_are_reported(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters in them are escaped."""
    monkeypatch.chdir(tmp_path)
    _begun(RUN)
    (tmp_path / "d" / "report.html").unlink()
    _linked("report.html", tmp_path / name)
    assert main(RUN) in (1, 2)
    told = capsys.readouterr().err
    assert f"d/report.html leads out of d, to {shown.format(tmp_path)}; remove that link" in told
    assert "\x1b" not in told


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
    with time_limit(60):
        assert main(RUN) == 0
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_landscape_does_not_follow_links_out(downloaded: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    (downloaded / "r" / "landscape.json").symlink_to(target)
    assert main(["landscape", "r", *LOOK, "--plugin", "theirs.py"]) == 1
    assert not target.exists()


@pytest.mark.parametrize(("words", "name"), [(["report"], "report.html"), (["figures", "matrix"], "matrix.svg")])
def test_default_outputs_do_not_follow_links_out(words: list[str], name: str, downloaded: Path, tmp_path: Path) -> None:
    if words[0] == "figures":
        pytest.importorskip("matplotlib")
    target = tmp_path / "precious"
    (downloaded / name).symlink_to(target)
    assert main([*words, "r"]) == 1
    assert not target.exists()
    assert main([*words, "r", "-o", name]) == 0  # the user's own choice
    assert target.exists()


def test_links_within_a_directory_and_to_it_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere" / "kept").mkdir(parents=True)
    (tmp_path / "d").symlink_to("elsewhere")
    (tmp_path / "elsewhere" / "checkpoints").symlink_to("kept")
    assert main(["run", "pmnist", "finetune", *SHORT, "--out", "d", "--resume"]) in (0, 2)


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
