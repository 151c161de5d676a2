"""Finished runs as reports and figures see them: result, log and landscape of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.errors import RunError, SteppeError
from steppe.results.file_names import LANDSCAPE, TABLES
from steppe.results.log import TaskLog, read_task_log
from steppe.results.schema import RunResult
from steppe.results.tables import TIME_LABELS, common_time_measure, seconds_per_task
from steppe.runtime.environment import printable
from steppe.runtime.files import read_json

if TYPE_CHECKING:
    from steppe.landscape.files import Landscape, Pair

_TABLE_JSON = TABLES[2]


@dataclass(frozen=True)
class FinishedRun:
    """One finished run; its log and its landscape are read when they are first needed.

    Attributes:
        path: The run directory.
        result: The content of its result.json.
        name: A short name for readers.
    """

    path: Path
    result: RunResult
    name: str = ""

    @property
    def benchmark(self) -> str:
        """Name of the benchmark."""
        return self.result.benchmark

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.result.method

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return self.result.num_tasks

    @property
    def is_incremental(self) -> bool:
        """Whether the tasks were learned one at a time, so that there is an accuracy after each of them."""
        return all(row[0] is not None for row in self.result.accuracy)

    def accuracy_of(self, task: int) -> list[float]:
        """Test accuracy on a task after it was learned and after every later task.

        Args:
            task: The task's number, from 1.

        Returns:
            The accuracies in order.
        """
        return [value for row in self.result.accuracy[task - 1 :] if (value := row[task - 1]) is not None]

    def mean_accuracies(self) -> list[float]:
        """After each task the mean accuracy over all tasks so far, of an incremental run."""
        rows = [[value for value in row if value is not None] for row in self.result.accuracy]
        return [sum(row) / len(row) for row in rows]

    def setting(self, name: str) -> Any:
        """A setting of the method; None if it has no such setting."""
        return self.result.config["method"].get(name)

    @cached_property
    def log(self) -> TaskLog:
        """What the run's log says about each task; empty without a log."""
        return read_task_log(self.path)

    @property
    def landscape(self) -> Landscape | None:
        """The measured loss landscape; None if there is none.

        Raises:
            RunError: It cannot be read or belongs to another run.
        """
        if isinstance(self._landscape, SteppeError):
            raise self._landscape
        return self._landscape

    @property
    def usable_landscape(self) -> Landscape | None:
        """The measured loss landscape; None if there is none, or none that can be read and shown."""
        found = self._landscape
        return found if not isinstance(found, SteppeError) and found is not None and found.pairs else None

    @cached_property
    def _landscape(self) -> Landscape | SteppeError | None:
        if not (self.path / LANDSCAPE).exists():
            return None
        from steppe.landscape.files import read_landscape_of  # loads torch

        try:
            return read_landscape_of(self.path, self.result)
        except SteppeError as error:
            return error

    def pair(self, after: int, task: int) -> Pair | None:
        """The landscape of a task after another task, both numbered from 1; None if it was not measured."""
        return None if self.landscape is None else self.landscape.pairs.get((after, task))

    @property
    def remarks(self) -> list[str]:
        """What readers must know: the remarks of result and log, and why a landscape is not shown."""
        remarks = [*self.result.remarks, *self.log.remarks]
        if isinstance(self._landscape, SteppeError):
            remarks.append(printable(f"its landscape is left out: {self._landscape}"))
        elif self._landscape is not None and not self._landscape.pairs:
            remarks.append("its landscape is left out: it contains no profile.")
        return list(dict.fromkeys(remarks))


@dataclass(frozen=True)
class Study:
    """A study's benchmark and command."""

    benchmark: str
    command: str


@dataclass(frozen=True)
class Collection:
    """The runs and studies in some directories.

    Attributes:
        runs: The finished runs.
        unfinished: Directories of unfinished runs.
        studies: The studies that have a table.
        damaged: What is wrong with results that cannot be read, by run directory.
    """

    runs: list[FinishedRun]
    unfinished: list[Path]
    studies: list[Study]
    damaged: dict[Path, RunError] = field(default_factory=dict)


def collect(directories: Sequence[Path]) -> Collection:
    """Find all runs in some directories, each once.

    Args:
        directories: Directories of runs or studies.

    Returns:
        The runs and studies found.

    Raises:
        UsageError: One of them is not a directory or contains no finished run.
        RunError: None of the results in one of them can be read.
    """
    runs: dict[Path, FinishedRun] = {}
    unfinished: dict[Path, Path] = {}
    damaged: dict[Path, tuple[Path, RunError]] = {}
    studies: dict[Study, None] = {}
    from steppe.experiments.run_directory import read_results  # loads torch

    for directory in directories:
        results, unfinished_here, damaged_here = read_results(directory)
        for path, result in results.items():
            runs.setdefault(path.resolve(), FinishedRun(path, result, _short_name(directory, path)))
        for path in unfinished_here:
            unfinished.setdefault(path.resolve(), path)
        for path, error in damaged_here.items():
            damaged.setdefault(path.resolve(), (path, error))
        studies |= dict.fromkeys(_read_studies(directory))
    return Collection(list(runs.values()), list(unfinished.values()), list(studies), dict(damaged.values()))


def _read_studies(directory: Path) -> Iterator[Study]:
    for file in sorted(directory.rglob(_TABLE_JSON)):
        try:
            table = read_json(file)
            yield Study(str(table["benchmark"]), printable(str(table["command"])))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # the runs have commands of their own
            continue


def _short_name(directory: Path, path: Path) -> str:
    """The part of a run's path that distinguishes it."""
    return printable(str(Path(directory.resolve().name) / path.relative_to(directory)))


def training_times(runs: Sequence[FinishedRun]) -> tuple[dict[Path, float], str]:
    """Training time per task, without testing.

    Returns:
        The seconds by run directory, and what they are: CPU seconds if all runs recorded them, else seconds.
    """
    measure = common_time_measure(run.result for run in runs)
    return {run.path: seconds_per_task(run.result, measure) for run in runs}, TIME_LABELS[measure]


def methods_of(runs: Iterable[FinishedRun]) -> list[str]:
    """The methods in order of first appearance."""
    return list(dict.fromkeys(run.method for run in runs))


def by_method(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """The runs of each method, methods in order of first appearance."""
    return {method: [run for run in runs if run.method == method] for method in methods_of(runs)}


def benchmarks_of(runs: Iterable[FinishedRun]) -> list[str]:
    """The benchmarks in order of first appearance."""
    return list(dict.fromkeys(run.benchmark for run in runs))


def on_benchmark(runs: Iterable[FinishedRun], benchmark: str) -> list[FinishedRun]:
    """The runs on one benchmark."""
    return [run for run in runs if run.benchmark == benchmark]
