"""Files of earlier versions are still readable: learners continue, runs and studies are resumed, results are shown."""

from __future__ import annotations

import json
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compat_files
import pytest
from compat_files import DIRECTORY, LANDSCAPE, all_saved, described, finished
from small_runs import logged

import steppe
from steppe.cli.main import main
from steppe.experiments.config import RunConfig
from steppe.experiments.run_directory import read_result

EXPECTED = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(DIRECTORY.glob("*.json"))}
LEARNERS = [(archive, name) for archive, expected in EXPECTED.items() for name in expected["learners"]]
CLOSE = 2e-3  # of outputs: other processors round differently
FEW = 10.0  # points of accuracy: two of twenty images


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each archive."""
    found = {}
    for archive in EXPECTED:
        found[archive] = tmp_path_factory.mktemp(archive)
        with tarfile.open(DIRECTORY / f"{archive}.tar.xz") as packed:
            packed.extractall(found[archive], filter="data")
    return found


@pytest.fixture
def files(request: pytest.FixtureRequest, unpacked: dict[str, Path], tmp_path: Path) -> Iterator[Path]:
    """A copy of an archive's files, with the benchmark of its runs."""
    with tarfile.open(DIRECTORY / f"{request.param}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    with compat_files.registered():
        yield tmp_path


on_archives = pytest.mark.parametrize(
    ("files", "expected"), [(name, EXPECTED[name]["runs"]) for name in EXPECTED], indirect=["files"], ids=list(EXPECTED)
)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (found["tasks"], found["interrupted"]) == (expected["tasks"], expected["interrupted"])
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=FEW)
    for row, wanted in zip(found["outputs"], expected["outputs"], strict=True):
        assert row == pytest.approx(wanted, abs=CLOSE)


@pytest.mark.parametrize(("archive", "name"), LEARNERS)
def test_a_learner_is_loaded_and_goes_on(archive: str, name: str, unpacked: dict[str, Path]) -> None:
    saved, expected = all_saved()[name], EXPECTED[archive]["learners"][name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = steppe.load(unpacked[archive] / saved.file, saved.model(1))
    assert_close(described(loaded, saved), expected["loaded"])
    # Evaluating draws nothing, so the same learner can continue.
    assert_close(finished(loaded, saved), expected["finished"])


def assert_rows(found: list[list[float | None]], expected: list[list[float | None]], exactly: int = 0) -> None:
    assert found[:exactly] == expected[:exactly]
    for row, wanted in zip(found, expected, strict=True):
        assert [value is None for value in row] == [value is None for value in wanted]
        for value, other in zip(row, wanted, strict=True):
            assert value == pytest.approx(other, abs=FEW)


@on_archives
def test_a_finished_run_is_shown(files: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    result = read_result(files / "finished")
    assert result.accuracy == expected["finished"]
    assert main(["show", str(files / "finished")]) == 0
    shown = capsys.readouterr().out
    written = (files / "finished" / "report.md").read_text(encoding="utf-8")
    rows = [line for line in written.splitlines() if line.startswith("|") and any(sign.isdigit() for sign in line)]
    assert rows
    assert all(row in shown for row in rows)  # the words around the numbers may change
    assert main(["show", str(files), "--details"]) == 0
    assert "fs-dgpm" in capsys.readouterr().out
    assert main(["report", str(files / "finished"), "-o", str(files / "page.html")]) == 0


@on_archives
def test_finished_run_is_not_changed(files: Path, expected: dict[str, Any]) -> None:
    before = {file: file.read_bytes() for file in (files / "finished").rglob("*") if file.is_file()}
    assert main(["resume", str(files / "finished")]) == 0
    after = {file: file.read_bytes() for file in (files / "finished").rglob("*") if file.is_file()}
    assert {file: after[file] for file in before} == before


@on_archives
def test_run_is_repeated_from_its_configuration(files: Path, expected: dict[str, Any]) -> None:
    config = RunConfig.load(files / "finished" / "config.toml")
    now, then = config.as_dict(), read_result(files / "finished").config
    for section, values in then.items():  # newer settings have their defaults
        assert {key: now[section][key] for key in values} == values
    assert main(["run", "--config", str(files / "finished" / "config.toml"), "--out", str(files / "again")]) == 0
    assert_rows(read_result(files / "again").accuracy, expected["finished"])
    kinds = [[line["event"] for line in logged(files / name)] for name in ("finished", "again")]
    assert kinds[0] == kinds[1]


@on_archives
def test_a_stopped_run_is_resumed(files: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(files / "stopped")]) == 0
    assert "resumed after 1 of 3 tasks, in epoch 2 of 'compat 2'" in capsys.readouterr().err
    assert_rows(read_result(files / "stopped").accuracy, expected["stopped"], exactly=1)
    lines = logged(files / "stopped")
    assert [line["task"] for line in lines if line["event"] == "TaskEnded"] == [0, 1, 2]
    ended = [line for line in lines if line["event"] == "EpochEnded"]
    assert [(line["task"], line["epoch"]) for line in ended] == [
        (task, epoch) for task in range(3) for epoch in range(3)
    ]
    assert [line["loss"] for line in ended] == pytest.approx(expected["losses of stopped"], abs=CLOSE)


@on_archives
def test_a_study_is_resumed(files: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    study = files / "study"
    before = (study / "er" / "seed-0" / "result.json").read_bytes()
    assert main(["resume", str(study), "--jobs", "1"]) == 0
    assert (study / "er" / "seed-0" / "result.json").read_bytes() == before
    assert_rows(read_result(study / "finetune" / "seed-0").accuracy, expected["missing"])
    capsys.readouterr()
    assert main(["show", str(study)]) == 0
    assert "| er | 1 |" in capsys.readouterr().out


@on_archives
def test_landscape_is_resumed(files: Path, expected: dict[str, Any]) -> None:
    file = files / "finished" / "landscape.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    assert main(["landscape", str(files / "finished"), *LANDSCAPE, "--resume"]) == 0
    after = json.loads(file.read_text(encoding="utf-8"))
    for part in ("weights", "profiles", "flatness", "noise", "bound"):
        assert list(before[part]) == ["3"]
        assert list(after[part])[-2:] == ["2", "3"]
        assert after[part]["3"] == before[part]["3"]
