"""Loss landscapes: profiles of one task, the grid in the paper's appendix, surfaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import add_legend, add_titles, alphas_of, label_profile_axes, middle_task, plot_profile
from steppe.figures.style import COLORMAP, PAGE, display_name, new_figure
from steppe.report.finished_run import FinishedRun, by_method


def _afters(runs: Sequence[FinishedRun], choices: Choices) -> list[int]:
    """After the task itself, halfway, and at the end."""
    task, tasks = choices.task(1), runs[0].num_tasks
    return list(choices.afters or sorted({task, max(task, middle_task(tasks)), tasks}))


def _draw_profiles(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    task, afters = choices.task(1), _afters(runs, choices)
    figure = new_figure(PAGE, 2.4)
    panels = figure.subplots(1, len(afters), sharey=True, squeeze=False)[0]
    for axes, after in zip(panels, afters, strict=True):
        plot_profile(axes, runs, after, task)
        label_profile_axes(axes, loss=axes is panels[0])
    add_titles(panels, [f"task {task} after task {after}" for after in afters])
    add_legend(figure, panels)
    return figure


def _missing_profiles(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    return checks.same_tasks(runs) or checks.have_landscapes(
        runs, [(after, choices.task(1)) for after in _afters(runs, choices)]
    )


LANDSCAPES = Figure(
    "landscapes",
    "Loss of one task along random directions, after itself and after later tasks.",
    "landscape.json of every method; --task (default: 1), --after (default: the task, the fifth, the last)",
    _draw_profiles,
    _missing_profiles,
    by_task=True,
)


def _grid(runs: Sequence[FinishedRun], choices: Choices) -> list[tuple[int, int]]:
    """The chosen pairs (after, task) below the diagonal."""
    every = tuple(range(1, runs[0].num_tasks + 1))
    afters, tasks = choices.afters or every, choices.tasks or every
    return [(after, task) for task in tasks for after in afters if task <= after]


def _draw_grid(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    pairs = _grid(runs, choices)
    afters, tasks = sorted({after for after, _ in pairs}), sorted({task for _, task in pairs})
    side = (PAGE - 0.5) / max(len(afters), 4)
    figure = new_figure(PAGE, 0.85 * side * len(tasks) + 0.8)
    panels = figure.subplots(len(tasks), len(afters), sharex=True, sharey=True, squeeze=False)
    for row, task in enumerate(tasks):
        for column, after in enumerate(afters):
            axes = panels[row][column]
            if task > after:
                axes.set_axis_off()
                continue
            plot_profile(axes, runs, after, task, markers=4, linewidth=0.9, markersize=2)
            axes.grid(axis="y")
            last, lowest = column == len(afters) - 1, row == len(tasks) - 1
            axes.tick_params(labelleft=False, labelright=last, labelbottom=last and lowest, labelsize=5.5)
            if last:  # the only column in which every task has a panel
                axes.set_ylabel(f"task {task}\nloss", fontsize=6, labelpad=4)
                axes.yaxis.set_label_position("right")
            if last and lowest:
                axes.set_xlabel("α", labelpad=1)
            if row == 0:
                axes.set_title(f"after {after}", fontsize=6.5)
    add_legend(figure, [axes for row in panels for axes in row])
    return figure


def _missing_grid(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    problems = checks.same_tasks(runs)
    if problems:
        return problems
    pairs = _grid(runs, choices)
    return checks.have_landscapes(runs, pairs) if pairs else ["a task that is learned by then (--task, --after)"]


GRID = Figure(
    "landscape-grid",
    "Every task's loss (row) along random directions, after every later task (column).",
    "landscape.json of every method with all pairs; fewer with --task and --after",
    _draw_grid,
    _missing_grid,
    by_task=True,
)


def _surface_pair(runs: Sequence[FinishedRun], choices: Choices) -> tuple[int, int] | None:
    """The pair (after, task) to show: the chosen one, or else the last of which every method has a surface."""
    if choices.afters is not None or choices.tasks is not None:
        after = choices.after(runs[0].num_tasks)
        return after, choices.task(min(after, middle_task(runs[0].num_tasks)))
    there = [
        {key for run in own if run.landscape for key, pair in run.landscape.pairs.items() if pair.surface}
        for own in by_method(runs).values()
    ]
    return max(set.intersection(*there), default=None)


def _with_surface(runs: Sequence[FinishedRun], pair: tuple[int, int]) -> FinishedRun | None:
    return next((run for run in runs if (found := run.pair(*pair)) and found.surface), None)


def _draw_surface(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    pair = _surface_pair(runs, choices)
    assert pair is not None  # checked before drawing
    shown = {method: found for method, own in by_method(runs).items() if (found := _with_surface(own, pair))}
    columns = min(4, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(1.1 + 1.6 * columns, 0.45 + 1.65 * rows, square=True)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    surfaces = {method: run.pair(*pair).surface or [] for method, run in shown.items()}  # type: ignore[union-attr]
    levels = _levels([value for surface in surfaces.values() for row in surface for value in row])
    flat = list(panels.flat)
    for axes, (method, surface) in zip(flat, surfaces.items(), strict=False):
        grid = alphas_of(shown[method])
        turned = [list(column) for column in zip(*surface, strict=True)]  # the first direction is horizontal
        filled = axes.contourf(grid, grid, turned, levels=levels, cmap=COLORMAP, extend="max")
        axes.contour(grid, grid, turned, levels=levels, colors="white", linewidths=0.25)
        axes.plot(0, 0, marker="+", color="white", markersize=5)
        axes.set_aspect("equal")
        axes.set_title(f"{display_name(method)}, seed {shown[method].result.seed}")
    for axes in flat[len(surfaces) :]:
        axes.set_axis_off()
    figure.supxlabel("α, along the first direction", fontsize=7)
    figure.supylabel("β, along the second direction", fontsize=7)
    bar = figure.colorbar(filled, ax=panels, shrink=0.9, aspect=25)
    bar.set_label(f"loss of task {pair[1]} after task {pair[0]}")
    return figure


def _levels(values: Sequence[float]) -> list[float]:
    """Round, evenly spaced levels from the lowest loss to the 90th percentile, so that peaks do not hide the rest."""
    from matplotlib.ticker import MaxNLocator

    ordered = sorted(values)
    low, high = ordered[0], ordered[int(0.9 * (len(ordered) - 1))]
    return [float(level) for level in MaxNLocator(16).tick_values(low, high if high > low else low + 1.0)]


def _missing_surface(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    if problems := checks.same_tasks(runs):
        return problems
    pair = _surface_pair(runs, choices) or (runs[0].num_tasks, middle_task(runs[0].num_tasks))
    return checks.have_landscapes(runs, [pair], surface=True)


SURFACE = Figure(
    "surface",
    "Loss of one task over two random directions, one map for each method.",
    "landscape.json with a surface (--surface) of the same pair for every method; choose it by --task and --after",
    _draw_surface,
    _missing_surface,
    by_task=True,
)
