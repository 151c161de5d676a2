"""What a figure is: words about it, what it needs, what of that is missing, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steppe.errors import UsageError
from steppe.figures.style import matplotlib_style
from steppe.report.finished_run import FinishedRun, methods_of


@dataclass(frozen=True)
class Choices:
    """What a figure shows, where that is left open; tasks count from 1. None: the figure's own choice."""

    tasks: tuple[int, ...] | None = None
    afters: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None

    def task(self, otherwise: int) -> int:
        """The one task asked for."""
        return _one("--task", self.tasks, otherwise)

    def after(self, otherwise: int) -> int:
        """The one network asked for, by the last task it has learnt."""
        return _one("--after", self.afters, otherwise)

    def filter(self, runs: Sequence[FinishedRun]) -> list[FinishedRun]:
        """The runs of the methods asked for, in that order."""
        if self.methods is None:
            return list(runs)
        there = list(dict.fromkeys(run.method for run in runs))
        for method in self.methods:
            if method not in there:
                raise UsageError(f"--methods: there is no run of {method!r}. There are: {', '.join(there)}.")
        return [run for method in self.methods for run in runs if run.method == method]


def _one(option: str, given: tuple[int, ...] | None, otherwise: int) -> int:
    if given is None:
        return otherwise
    if len(given) != 1:
        raise UsageError(f"{option} {','.join(map(str, given))}: this figure shows one; give one.")
    return given[0]


@dataclass(frozen=True)
class Figure:
    """One of the figures. `missing` names what the runs lack, `draw` gives a figure of matplotlib's."""

    name: str
    text: str
    needs: str
    plot: Callable[[Sequence[FinishedRun], Choices], Any]
    missing: Callable[[Sequence[FinishedRun], Choices], list[str]]
    by_task: bool = False
    """Whether it asks for tasks: otherwise --task and --after would change nothing, and are refused."""

    def draw(self, runs: Sequence[FinishedRun], choices: Choices | None = None) -> Any:
        """The figure, if the runs hold what it needs."""
        choices = choices or Choices()
        for option, given in (("--task", choices.tasks), ("--after", choices.afters)):
            if given is not None and not self.by_task:
                numbers = ",".join(map(str, given))
                raise UsageError(f"{option} {numbers}: {self.name} does not ask which tasks to show: leave it out.")
        chosen = choices.filter(runs)
        if lacking := self.missing(chosen, choices):
            raise UsageError(f"{self.name}: missing: {'; '.join(lacking)}.")
        with matplotlib_style(methods_of(chosen)):
            return self.plot(chosen, choices)
