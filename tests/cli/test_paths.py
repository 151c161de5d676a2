"""Paths on the command line: ~ is expanded everywhere, and empty paths are errors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import made_result, write_run

from steppe.cli.main import build_parser, main
from steppe.registry import METHODS

SHORT = ["--set", "samples=20", "--set", "test_samples=20", "--tasks", "2"]
PLUGIN = "import steppe\nsteppe.register_method('at-home', steppe.Finetune, 'mine')\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory, and the current directory beside it."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))  # which --data changes
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    METHODS.pop("at-home", None)


def test_a_run_at_home(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "pmnist", "finetune", *SHORT, "--out=~/run"]) == 0
    assert main(["run", "--config=~/run/config.toml", "--out=~/again"]) == 0
    assert main(["resume", "~/run"]) == 0
    assert main(["show", "~/run"]) == 0
    assert main(["report", "~/run", "-o", "~/page.html"]) == 0
    few = ["--samples", "5", "--points", "3", "--radius", "1"]
    assert main(["landscape", "~/run", *few, "-o", "~/landscape.json"]) == 0
    (home / "own.py").write_text(PLUGIN, encoding="utf-8")
    assert main(["list", "at-home", "--plugin=~/own.py"]) == 0
    assert main(["data", "where", "--data=~"]) == 0
    assert capsys.readouterr().out.endswith(f"{home}\n")
    made = {path.name for path in home.iterdir()} - {"__pycache__"}
    assert made == {"run", "again", "page.html", "landscape.json", "own.py"}
    assert list(Path().iterdir()) == []


def test_a_directory_named_tilde(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("./~") / "run", made_result())
    assert main(["show", "./~/run"]) == 0
    assert main(["show", "~/run"]) == 2
    assert f"'{home}/run' is not a directory" in capsys.readouterr().err


def paths(parser: argparse.ArgumentParser, command: tuple[str, ...] = ()) -> Iterator[tuple[str, argparse.Action]]:
    """Every argument of every command that is a path, judging by its help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from paths(inner, (*command, name))
        elif action.metavar in ("DIR", "FILE", "RUN"):
            yield f"{' '.join(command)} {'/'.join(action.option_strings) or action.dest}", action


PATHS = dict(paths(build_parser()))


@pytest.mark.parametrize("argument", PATHS)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "the path is empty; use . for the current directory"),
        (" ", "the path is empty"),
        ("~nobody-is-called-so/x", "~nobody-is-called-so/x: no such home directory; write out the path (see"),
    ],
)
def test_invalid_paths_are_one_line_of_error(
    argument: str, path: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *words, last = argument.split(" ")
    option = last.split("/")[-1]
    before = ["matrix"] if words == ["figures"] and option == "directories" else []
    with pytest.raises(SystemExit) as stopped:
        main([*words, *before, *([f"{option}={path}"] if option.startswith("-") else [path])])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("steppe: argument ")
    assert said.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_the_paths_are_found() -> None:
    assert {"run --out", "study --out", "show directory", "figures -o/--out", "data fetch --data"} <= set(PATHS)
