"""The files of finished runs as plain data: results, logs, landscapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steppe.errors import RunError
from steppe.experiments.run_directory import read_results
from steppe.report.landscape_file import Landscape, read_landscape
from steppe.results.log import events
from steppe.runtime.environment import printable
from steppe.runtime.files import read_json

TABLE = "table.json"


@dataclass(frozen=True)
class Run:
    """One finished run; `records` are what its method told after each task, by the task's place."""

    name: str
    result: dict[str, Any]
    tasks: dict[int, str] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    landscape: Landscape | None = None


@dataclass(frozen=True)
class Study:
    """A study's benchmark and the command that made it."""

    benchmark: str
    command: str


@dataclass(frozen=True)
class Collected:
    """Everything a report is made of."""

    runs: list[Run]
    unfinished: list[Path]
    studies: list[Study]
    damaged: dict[Path, RunError] = field(default_factory=dict)
    """What is wrong with results that cannot be read."""


def collect(directories: Sequence[Path]) -> Collected:
    """All finished runs in these directories, each once; those that are unfinished or damaged are only named."""
    runs: dict[Path, Run] = {}
    unfinished: dict[Path, Path] = {}
    damaged: dict[Path, tuple[Path, RunError]] = {}
    studies: dict[Study, None] = {}
    for directory in directories:
        results, broken_off, spoilt = read_results(directory)
        for path, result in results.items():
            runs.setdefault(path.resolve(), read_run(path, _name(directory, path), result))
        for path in broken_off:
            unfinished.setdefault(path.resolve(), path)
        for path, error in spoilt.items():
            damaged.setdefault(path.resolve(), (path, error))
        studies |= dict.fromkeys(_studies(directory))
    return Collected(list(runs.values()), list(unfinished.values()), list(studies), dict(damaged.values()))


def read_run(path: Path, name: str, result: dict[str, Any]) -> Run:
    """One run: to its result comes what its log and its landscape add where they can be read."""
    tasks, records = {}, {}
    remarks = [str(remark) for remark in result.get("remarks") or []]
    for event in events(path):
        place, told = event.get("task"), event.get("method")
        if event.get("event") == "TaskEnded" and isinstance(place, int):
            tasks[place] = printable(str(event.get("name", "")))
            records[place] = told if isinstance(told, dict) else {}
            remarks += _texts(event.get("remarks"))
    landscape, trouble = read_landscape(path, result)
    return Run(name, result, tasks, records, tuple(dict.fromkeys([*remarks, *map(printable, trouble)])), landscape)


def _texts(told: Any) -> list[str]:
    """What a log holds where a list of texts should be: these alone, and of them what can be shown."""
    found = [printable(each) for each in told if isinstance(each, str)] if isinstance(told, list) else []
    return [text for text in found if text]


def _studies(directory: Path) -> Iterator[Study]:
    for file in sorted(directory.rglob(TABLE)):
        try:
            table = read_json(file)
            yield Study(str(table["benchmark"]), printable(str(table["command"])))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # the runs have commands of their own
            continue


def _name(directory: Path, path: Path) -> str:
    """A run's name for the page: no more of its path than tells it apart."""
    return printable(str(Path(directory.resolve().name) / path.relative_to(directory)))
