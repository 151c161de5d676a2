"""Plugins named in untrusted directories run only if the user names or trusts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_runs import CODE, LOOK, SHORT, unfinish

import steppe
from steppe.cli.main import main
from steppe.errors import UsageError
from steppe.experiments.config import RunConfig
from steppe.results.file_names import RESULT

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


@pytest.mark.parametrize("case", UNFINISHED)
def test_unnamed_plugins_do_not_run(case: str, downloaded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinish(downloaded)
    assert main(UNFINISHED[case]) == 2
    told = capsys.readouterr().err
    assert not (downloaded / "ran").exists()
    assert told.count("\n") == 1
    if not case.endswith("study") or "command" not in case:
        assert f"this needs the plugin {downloaded}/theirs.py. Plugins are Python code" in told
        assert f"pass --plugin {downloaded}/theirs.py, or --trust-plugins" in told


@pytest.mark.parametrize("case", ["the same command, a run", "the same command, a study"])
def test_unnamed_plugins_do_not_run_for_finished_runs(case: str, downloaded: Path) -> None:
    main(UNFINISHED[case])
    assert not (downloaded / "ran").exists()


@pytest.mark.parametrize("words", [["show"], ["show", "--details"], ["report"], ["figures", "matrix"]])
@pytest.mark.parametrize("place", ["r", "s"])
def test_unnamed_plugins_do_not_run_to_show_results(words: list[str], place: str, downloaded: Path) -> None:
    shutil.copy(downloaded / "r" / RESULT, downloaded / RESULT)
    assert main([*words, place]) in (0, 2)
    assert not (downloaded / "ran").exists()


@pytest.mark.parametrize("trust", [["--plugin", "theirs.py"], ["--trust-plugins"]])
@pytest.mark.parametrize(
    "case", ["resume a run", "resume a study", "a landscape", "landscapes of a study", "a run's configuration"]
)
def test_named_or_trusted_plugins_run(case: str, trust: list[str], downloaded: Path) -> None:
    if "resume" in case:
        unfinish(downloaded)
    assert main([*UNFINISHED[case], *trust]) == 0
    assert (downloaded / "ran").exists()


def test_the_library_does_not_run_unnamed_plugins(downloaded: Path) -> None:
    config = downloaded / "r" / "config.toml"
    with pytest.raises(UsageError, match="this needs the plugin"):
        RunConfig.load(config)
    assert not (downloaded / "ran").exists()
    assert RunConfig.load(config, [str(downloaded / "theirs.py")]).method == "theirs"


def test_the_users_plugin_replaces_one_of_the_same_name(downloaded: Path, tmp_path: Path) -> None:
    unfinish(downloaded)
    (tmp_path / "theirs.py").write_text(CODE, encoding="utf-8")
    assert main(["resume", "r", "--plugin", str(tmp_path / "theirs.py")]) == 0
    assert (tmp_path / "ran").exists()
    assert not (downloaded / "ran").exists()


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
