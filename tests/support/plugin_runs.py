"""Finished runs of a plugin, as received from someone else; running the plugin leaves a trace."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from steppe.cli.main import main
from steppe.experiments import plugins
from steppe.registry import METHODS
from steppe.results.file_names import RESULT

SHORT = ["--set", "benchmark.samples=20", "--set", "benchmark.test_samples=20", "--tasks", "2"]
CODE = "import pathlib, steppe\npathlib.Path(__file__).with_name('ran').touch()\n"
CODE += "steppe.register_method('theirs', steppe.Finetune, 'theirs')\n"
LOOK = ["--samples", "10", "--directions", "1", "--points", "11"]


@pytest.fixture(scope="session")
def plugin_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, `r`, and a study, `s`, both of the plugin `theirs.py`."""
    place = tmp_path_factory.mktemp("plugin_runs")
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
def downloaded(plugin_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy, as if unpacked from an archive, in a process that has not run the plugin."""
    place = tmp_path / "downloaded"
    shutil.copytree(plugin_runs, place)
    for file in [*place.rglob("config.toml"), *place.rglob("*.json")]:
        file.write_text(file.read_text(encoding="utf-8").replace(str(plugin_runs), str(place)), encoding="utf-8")
    (place / "ran").unlink()
    monkeypatch.chdir(place)
    yield place
    _forget()


def _forget() -> None:
    METHODS.pop("theirs", None)
    plugins._DIGESTS.clear()


def unfinish(place: Path) -> None:
    """Delete the results, so that there is something to resume."""
    for result in place.rglob(RESULT):
        result.unlink()


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fail, by an alarm, instead of waiting forever."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError(f"still waiting after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
