"""The accuracy matrix as a heat map: test accuracy on each task after each task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import accuracy_label
from steppe.figures.style import COLORMAP, PAGE, display_name, new_figure
from steppe.report.finished_run import FinishedRun, by_method

_MAX_ANNOTATED = 10  # tasks: larger matrices have no numbers in their cells


def mean_matrix(runs: Sequence[FinishedRun]) -> list[list[float]]:
    """The mean accuracy matrix over seeds; NaN where it was not measured."""
    size = runs[0].num_tasks

    def cell(row: int, column: int) -> float:
        values = [value for run in runs if (value := run.result.accuracy[row][column]) is not None]
        return statistics.fmean(values) if len(values) == len(runs) else math.nan

    return [[cell(row, column) for column in range(size)] for row in range(size)]


def _draw(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    matrices = {method: mean_matrix(own) for method, own in by_method(runs).items()}
    known = [value for matrix in matrices.values() for row in matrix for value in row if not math.isnan(value)]
    across = 4 if runs[0].num_tasks > _MAX_ANNOTATED else 3
    columns = min(across, len(matrices))
    rows = math.ceil(len(matrices) / columns)
    side = (PAGE - 0.8) / across
    figure = new_figure(side * columns + 0.8, (side + 0.1) * rows + 0.3, square=True)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    size = runs[0].num_tasks
    for axes, (method, matrix) in zip(panels.flat, matrices.items(), strict=False):
        corners = [place + 0.5 for place in range(size + 1)]
        drawn = axes.pcolormesh(corners, corners, matrix, cmap=COLORMAP, vmin=min(known), vmax=max(known))
        axes.set_ylim(size + 0.5, 0.5)
        axes.set_aspect("equal")
        axes.set_title(display_name(method))
        if size <= _MAX_ANNOTATED:
            _annotate(axes, matrix, (min(known) + max(known)) / 2)
    _ticks(panels[0][0], size)
    for place, axes in enumerate(panels.flat):
        axes.tick_params(labelbottom=place + columns >= len(matrices))
        if place >= len(matrices):
            axes.set_axis_off()
    figure.supxlabel(f"{accuracy_label(runs).removesuffix(' (%)')} on task", fontsize=7)
    figure.supylabel("after task", fontsize=7)
    figure.colorbar(drawn, ax=panels, shrink=min(0.8, 1.6 / rows), aspect=25, label=accuracy_label(runs))
    return figure


def _ticks(axes: Any, size: int) -> None:
    step = 1 if size <= _MAX_ANNOTATED else 5
    places = [1, *range(step, size + 1, step)] if step > 1 else list(range(1, size + 1))
    axes.set_xticks(places)
    axes.set_yticks(places)


def _annotate(axes: Any, matrix: list[list[float]], middle: float) -> None:
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            if not math.isnan(value):
                color = "white" if value < middle else "black"
                axes.text(column + 1, row + 1, f"{value:.0f}", ha="center", va="center", color=color, fontsize=5.5)


def _missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    return checks.same_tasks(runs)


MATRIX = Figure(
    "matrix",
    "Test accuracy on each task after each task, one map for each method; means over seeds.",
    "runs of one benchmark",
    _draw,
    _missing,
)
