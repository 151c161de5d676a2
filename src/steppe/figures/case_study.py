"""The paper's case study: does flattening the loss improve replay? ER against FS-ER."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.ablation import plot_measure
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import (
    add_legend,
    add_titles,
    label_profile_axes,
    middle_task,
    plot_mean_accuracy,
    plot_profile,
)
from steppe.figures.style import PAGE, new_figure
from steppe.report.finished_run import FinishedRun, methods_of

_PAIR = ("er", "fs-er")


def _shown(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    return [run for method in _PAIR for run in runs if run.method == method]


def _pairs(runs: Sequence[FinishedRun], choices: Choices) -> list[tuple[int, int]]:
    task = choices.task(middle_task(runs[0].num_tasks))
    return [(task, task), (choices.after(runs[0].num_tasks), task)]


def _draw(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    shown = _shown(runs)
    pairs = _pairs(shown, choices)
    figure = new_figure(PAGE, 3.8)
    rows = figure.subplot_mosaic("aabbcc;.ddee.", gridspec_kw={"hspace": 0.06})
    panels = [rows[name] for name in "abcde"]
    plot_mean_accuracy(panels[0], shown)
    for axes, pair in zip(panels[1:3], pairs, strict=True):
        plot_profile(axes, shown, *pair)
        label_profile_axes(axes, loss=axes is panels[1])
    panels[2].sharey(panels[1])
    panels[1].autoscale()
    for axes, measure in zip(panels[3:], ("acc", "bwt"), strict=True):
        plot_measure(axes, shown, measure)
    titles = [f"task {task} after task {after}" for after, task in pairs]
    add_titles(panels, ["average accuracy so far", *titles, "final ACC", "final BWT"])
    add_legend(figure, panels)
    return figure


def _missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    lacking = [
        f"runs of {method} (steppe study pmnist-60k er fs-er)" for method in _PAIR if method not in methods_of(runs)
    ]
    if lacking:
        return lacking
    shown = _shown(runs)
    return checks.same_tasks(shown) or checks.have_landscapes(shown, _pairs(shown, choices))


CASE_STUDY = Figure(
    "case-study",
    "ER against FS-ER: average accuracy, landscapes of a task, ACC and BWT with the paper's figures.",
    "runs of er and fs-er with landscape.json; --task (default: 5), --after (default: the last)",
    _draw,
    _missing,
    by_task=True,
)
