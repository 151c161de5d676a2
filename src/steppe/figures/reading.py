"""What runs have left on disk, as figures use it: result.json, log.jsonl, landscape.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.results.tables import SECONDS, seconds_per_task, timed_by

if TYPE_CHECKING:
    from steppe.landscape.files import Landscape, Pair


@dataclass(frozen=True)
class Run:
    """A finished run; its log and its landscape are read when a figure asks for them."""

    path: Path
    result: dict[str, Any]

    @property
    def benchmark(self) -> str:
        """On which tasks."""
        return str(self.result["benchmark"])

    @property
    def method(self) -> str:
        """By which method."""
        return str(self.result["method"])

    @property
    def tasks(self) -> int:
        """How many there were."""
        return len(self.result["accuracy"])

    @property
    def one_by_one(self) -> bool:
        """Whether every task was tested when it was learnt, so that there are curves to draw."""
        return all(row[0] is not None for row in self.result["accuracy"])

    def accuracy_of(self, task: int) -> list[float]:
        """Test accuracy on a task (from 1) after it and after every later one."""
        return [float(row[task - 1]) for row in self.result["accuracy"][task - 1 :]]

    def mean_accuracies(self) -> list[float]:
        """After every task, the mean over all tasks so far."""
        return [sum(row[: place + 1]) / (place + 1) for place, row in enumerate(self.result["accuracy"])]

    def setting(self, name: str) -> Any:
        """A setting of the method, None where it has none of this name."""
        return self.result["config"]["method"].get(name)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """What the log tells of the method at each task's end; nothing where there is no log."""
        from steppe.results.log import events

        told = [event.get("method") for event in events(self.path) if event.get("event") == "TaskEnded"]
        return [record for record in told if isinstance(record, dict)]

    @cached_property
    def landscape(self) -> Landscape | None:
        """The loss around the weights, None where it has not been measured."""
        from steppe.landscape.files import read_landscape_of

        return read_landscape_of(self.path, self.result)

    def pair(self, after: int, task: int) -> Pair | None:
        """A task's landscape after another task, None where it has not been measured."""
        return None if self.landscape is None else self.landscape.pairs.get((after, task))


def training_times(runs: Sequence[Run]) -> tuple[dict[Path, float], str]:
    """Seconds of learning for each task, without testing, by the run's path, and what these seconds are called: the
    processor's where all of the runs were recorded with them.
    """
    measure = timed_by(run.result for run in runs)
    return {run.path: seconds_per_task(run.result, measure) for run in runs}, SECONDS[measure]


def methods(runs: Iterable[Run]) -> list[str]:
    """The methods, in the order in which they first appear."""
    return list(dict.fromkeys(run.method for run in runs))


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each method, in the order in which the methods first appear."""
    return {method: [run for run in runs if run.method == method] for method in methods(runs)}


def benchmarks(runs: Iterable[Run]) -> list[str]:
    """The benchmarks, in the order in which they first appear."""
    return list(dict.fromkeys(run.benchmark for run in runs))


def of_benchmark(runs: Iterable[Run], benchmark: str) -> list[Run]:
    """The runs on one of them."""
    return [run for run in runs if run.benchmark == benchmark]
