"""Accuracy as tasks are learned: on the first task alone, and the mean over all tasks so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import add_legend, label_task_axis, plot_curve, plot_task_accuracy
from steppe.figures.style import PAGE, new_figure
from steppe.report.finished_run import FinishedRun, by_method


def _draw(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    drawn = [run for run in runs if run.is_incremental]
    figure = new_figure(PAGE, 3.0)
    first, average = figure.subplots(1, 2, sharey=True)
    plot_task_accuracy(first, drawn, 1)
    for method, own in by_method(drawn).items():
        plot_curve(average, range(1, own[0].num_tasks + 1), [run.mean_accuracies() for run in own], method)
    label_task_axis(average, "")
    first.set_title("first task, as others follow")
    average.set_title("mean over all tasks so far")
    add_legend(figure, (first, average))
    return figure


def _missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    return checks.same_tasks(runs) or checks.any_incremental(runs)


FORGETTING = Figure(
    "forgetting",
    "Accuracy as tasks are learned: on the first task alone, and the mean over all so far.",
    "runs of one benchmark",
    _draw,
    _missing,
)
