"""The paper's Figure 1: stability on the first task, sensitivity on the fifth, and how flat the loss is around each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import (
    accuracy_label,
    add_legend,
    add_titles,
    cut_axis,
    label_profile_axes,
    middle_task,
    plot_bars,
    plot_profile,
    plot_task_accuracy,
)
from steppe.figures.style import PAGE, new_figure
from steppe.report.finished_run import FinishedRun, by_method
from steppe.results.statistics import mean_std


def _pairs(runs: Sequence[FinishedRun], choices: Choices) -> list[tuple[int, int]]:
    """Pairs (after, task): the first task after the later one and at the end, the later one right after it."""
    later, last = choices.task(middle_task(runs[0].num_tasks)), choices.after(runs[0].num_tasks)
    return [(later, 1), (last, 1), (later, later)]


def _draw(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    pairs = _pairs(runs, choices)
    later, last = pairs[0][0], pairs[1][0]
    figure = new_figure(PAGE, 3.9)
    rows = figure.subplot_mosaic("aabbcc;.ddee.", gridspec_kw={"hspace": 0.06})
    panels = [rows[name] for name in "abcde"]
    plot_task_accuracy(panels[0], runs, 1)
    learned = {
        method: [run.accuracy_of(later)[0] for run in own] for method, own in by_method(_incremental(runs)).items()
    }
    plot_bars(panels[3], learned, accuracy_label(runs))
    points = [point for values in learned.values() if (point := mean_std(values))]
    means, widest = [point.mean for point in points], max(point.std or 0.0 for point in points)
    cut_axis(panels[3], min(means) - widest, max(means) + widest)
    for axes, pair in zip((panels[1], panels[2], panels[4]), pairs, strict=True):
        plot_profile(axes, runs, *pair)
        label_profile_axes(axes, loss=True)
    panels[2].sharey(panels[1])
    panels[1].autoscale()
    panels[2].set_ylabel("")
    add_titles(
        panels,
        [
            "stability: accuracy of task 1",
            f"task 1 after task {later}",
            f"task 1 after task {last}",
            f"sensitivity: accuracy of task {later}",
            f"task {later} after task {later}",
        ],
    )
    add_legend(figure, panels)
    return figure


def _incremental(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    return [run for run in runs if run.is_incremental]


def _missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    problems = checks.same_tasks(runs) or checks.any_incremental(runs) or checks.all_incremental(runs)
    return problems or checks.have_landscapes(runs, _pairs(runs, choices))


STABILITY = Figure(
    "stability",
    "The paper's Figure 1 (and, of the family, Figure 5): accuracy and landscape of the first task and of a later one.",
    "landscape.json of every method; --task for the later task (default: 5), --after for the end",
    _draw,
    _missing,
    by_task=True,
)
