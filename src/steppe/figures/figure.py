"""The definition of a figure: its description, what it needs, what the runs lack, and how to plot it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steppe.errors import UsageError
from steppe.figures.style import matplotlib_style
from steppe.report.finished_run import FinishedRun, methods_of


@dataclass(frozen=True)
class Choices:
    """What to show in a figure. None: the figure's default.

    Attributes:
        tasks: Task numbers, from 1.
        afters: The networks to show, each by the number of the last task it learned.
        methods: The methods, in this order.
    """

    tasks: tuple[int, ...] | None = None
    afters: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None

    def task(self, default: int) -> int:
        """The one task to show."""
        return _only("--task", self.tasks, default)

    def after(self, default: int) -> int:
        """The one network to show, by the number of the last task it learned."""
        return _only("--after", self.afters, default)

    def filter(self, runs: Sequence[FinishedRun]) -> list[FinishedRun]:
        """The runs of the chosen methods, in the order in which they were chosen.

        Args:
            runs: All runs.

        Returns:
            The runs to show; all if no methods were chosen.

        Raises:
            UsageError: There is no run of one of the methods.
        """
        if self.methods is None:
            return list(runs)
        known = methods_of(runs)
        for method in self.methods:
            if method not in known:
                raise UsageError(f"--methods: no run of {method!r}; choose from {', '.join(known)}.")
        return [run for method in self.methods for run in runs if run.method == method]


def _only(option: str, numbers: tuple[int, ...] | None, default: int) -> int:
    if numbers is None:
        return default
    if len(numbers) != 1:
        raise UsageError(f"{option} {','.join(map(str, numbers))}: this figure shows one; pass one number.")
    return numbers[0]


@dataclass(frozen=True)
class Figure:
    """One kind of figure.

    Attributes:
        name: Its name on the command line.
        text: What it shows.
        needs: What it needs, for users.
        plot: Plots runs that have everything the figure needs; returns a matplotlib figure.
        missing: Names what the runs lack.
        by_task: Whether `--task` and `--after` apply; passing them to other figures is an error.
    """

    name: str
    text: str
    needs: str
    plot: Callable[[Sequence[FinishedRun], Choices], Any]
    missing: Callable[[Sequence[FinishedRun], Choices], list[str]]
    by_task: bool = False

    def draw(self, runs: Sequence[FinishedRun], choices: Choices | None = None) -> Any:
        """Draw the figure.

        Args:
            runs: The runs to show.
            choices: What to show of them.

        Returns:
            A matplotlib figure.

        Raises:
            UsageError: The runs lack something; the message says what, and the command that adds it.
            RunError: matplotlib is not installed.
        """
        choices = choices or Choices()
        for option, numbers in (("--task", choices.tasks), ("--after", choices.afters)):
            if numbers is not None and not self.by_task:
                given = ",".join(map(str, numbers))
                raise UsageError(f"{option} {given}: {self.name} does not show single tasks; remove the option.")
        chosen = choices.filter(runs)
        if lacking := self.missing(chosen, choices):
            raise UsageError(f"{self.name}: missing: {'; '.join(lacking)}.")
        with matplotlib_style(methods_of(chosen)):
            return self.plot(chosen, choices)
