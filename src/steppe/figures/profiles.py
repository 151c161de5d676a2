"""Landscapes drawn: a method's profile is the mean over directions (and seeds, where several were measured)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steppe.figures.panels import curve
from steppe.figures.reading import Run, by_method


def middle_task(tasks: int) -> int:
    """The paper looks at the fifth task of ten; of fewer than six, at the one in the middle."""
    return 5 if tasks > 5 else (tasks + 1) // 2


def profile(axes: Any, runs: Sequence[Run], after: int, task: int, *, markers: int = 8, **options: Any) -> None:
    """The loss g(α) of a task around the weights after another one, of every method; bands are over directions, some
    markers along each line tell it from others in grey.
    """
    for method, own in by_method(runs).items():
        measured = [run for run in own if run.pair(after, task) is not None]
        samples = [losses for run in measured for losses in run.pair(after, task).losses]  # type: ignore[union-attr]
        if samples:
            every = max(1, len(samples[0]) // markers)
            curve(axes, alphas(measured[0]), samples, method, markevery=every, **options)


def alphas(run: Run) -> list[float]:
    """Where a run's landscape was measured."""
    assert run.landscape is not None  # asked for before
    return list(run.landscape.settings.alphas)


def along_direction(axes: Any, *, measure: bool) -> None:
    """Axes of the loss against α; the loss is named on the first panel of several."""
    axes.set_xlabel("α")
    axes.set_ylabel("training loss" if measure else "")
    axes.grid(axis="y")
