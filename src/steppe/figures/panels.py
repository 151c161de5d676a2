"""Parts that figures are composed of: curves with bands, bar charts, loss profiles, legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steppe.figures.style import BLACK, display_name, style_of
from steppe.report.finished_run import FinishedRun, by_method
from steppe.results.statistics import mean_std

BAND = 0.18
"""Opacity of a band of one standard deviation."""


def plot_curve(axes: Any, x: Sequence[float], samples: Sequence[Sequence[float]], method: str, **options: Any) -> None:
    """Plot a method's mean as a line, with a band of one standard deviation.

    Args:
        axes: Where to plot.
        x: The x coordinates.
        samples: One curve for each run or direction.
        method: The method, which determines color and label.
        **options: Passed on to matplotlib's `plot`.
    """
    style = style_of(method)
    points = [point for values in zip(*samples, strict=True) if (point := mean_std(values))]
    settings = {"marker": style.marker, "linestyle": style.line, "color": style.color, "label": display_name(method)}
    axes.plot(x, [point.mean for point in points], **{**settings, **options})
    if len(samples) > 1:
        low = [point.mean - (point.std or 0.0) for point in points]
        high = [point.mean + (point.std or 0.0) for point in points]
        axes.fill_between(x, low, high, color=style.color, alpha=BAND, linewidth=0)


def accuracy_label(runs: Sequence[FinishedRun]) -> str:
    """What the accuracies were measured on."""
    return "validation accuracy (%)" if any(run.result.on_validation for run in runs) else "test accuracy (%)"


def plot_task_accuracy(axes: Any, runs: Sequence[FinishedRun], task: int) -> None:
    """Plot a task's test accuracy as later tasks are learned, for incremental methods."""
    for method, group in by_method([run for run in runs if run.is_incremental]).items():
        plot_curve(axes, range(task, group[0].num_tasks + 1), [run.accuracy_of(task) for run in group], method)
    label_task_axis(axes, accuracy_label(runs))


def plot_mean_accuracy(axes: Any, runs: Sequence[FinishedRun]) -> None:
    """Plot the mean accuracy over all tasks so far; for joint training a horizontal line at the final accuracy."""
    for method, group in by_method(runs).items():
        if all(run.is_incremental for run in group):
            plot_curve(axes, range(1, group[0].num_tasks + 1), [run.mean_accuracies() for run in group], method)
        else:
            level = [[run.result.acc] * 2 for run in group]
            plot_curve(axes, (1, group[0].num_tasks), level, method, marker="")
    label_task_axis(axes, f"average {accuracy_label(runs)}".replace("test ", ""))


def label_task_axis(axes: Any, measure: str) -> None:
    """Label axes that show a measure against the number of tasks learned."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("tasks learned")
    axes.set_ylabel(measure)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def plot_bars(axes: Any, samples: dict[str, list[float]], measure: str, *, horizontal: bool = False) -> None:
    """Plot a bar for each method: the mean of its values, with one standard deviation.

    Args:
        axes: Where to plot.
        samples: Values by method.
        measure: Label of the axis.
        horizontal: Whether the bars lie horizontally.
    """
    positions = list(range(len(samples)))
    points = [point for values in samples.values() if (point := mean_std(values))]
    means = [point.mean for point in points]
    stds = [math.nan if point.std is None else point.std for point in points]
    settings = {
        "color": [style_of(method).color for method in samples],
        "edgecolor": BLACK,
        "alpha": 0.75,
        "error_kw": {"linewidth": 0.8, "capsize": 1.8, "capthick": 0.8},
    }
    names = [display_name(method) for method in samples]
    if horizontal:
        axes.barh(positions, means, xerr=stds, height=0.7, **settings)
        axes.set_yticks(positions, names)
        axes.invert_yaxis()
        axes.set_xlabel(measure)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
    else:
        axes.bar(positions, means, yerr=stds, width=0.7, **settings)
        slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(names) > 3 else {}
        axes.set_xticks(positions, names, **slanted)
        axes.set_ylabel(measure)
        axes.grid(axis="y")
        axes.tick_params(axis="x", length=0)


def cut_axis(axes: Any, low: float, high: float) -> None:
    """Cut a bar chart's axis to the range of the values, so that differences are visible, and say so in its label.

    The axis still starts at 0 if 0 is near.
    """
    margin = 0.12 * (high - low) or 1.0
    bottom, top = low - margin, high + margin
    if bottom > 0 and low < 0.5 * high:
        bottom = 0.0
    if top < 0 and abs(high) < 0.5 * abs(low):
        top = 0.0
    axes.set_ylim(bottom, top)
    if bottom > 0 or top < 0:
        axes.set_ylabel(f"{axes.get_ylabel()}, cut axis")


def add_legend(figure: Any, panels: Iterable[Any], more: Mapping[str, Any] | None = None) -> None:
    """Add one legend for all panels below them.

    Args:
        figure: The figure.
        panels: Its axes.
        more: Further handles by label.
    """
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    entries |= more or {}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(6, len(entries)))


def add_titles(panels: Sequence[Any], titles: Sequence[str]) -> None:
    """Title the panels (a), (b), ... and say what each shows."""
    for index, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        axes.set_title(f"({chr(ord('a') + index)}) {title}")


def middle_task(tasks: int) -> int:
    """The task to show by default: the fifth, as in the paper, or the middle one of fewer than six."""
    return 5 if tasks > 5 else (tasks + 1) // 2


def plot_profile(
    axes: Any, runs: Sequence[FinishedRun], after: int, task: int, *, markers: int = 8, **options: Any
) -> None:
    """Plot the loss g(α) of a task around the weights after another task, for every method; bands are over directions.

    Args:
        axes: Where to plot.
        runs: Runs, some of which have the landscape.
        after: The network, by the number of the last task it learned.
        task: The number of the task whose loss is shown.
        markers: About how many markers each line has; they distinguish lines in grayscale.
        **options: Passed on to matplotlib's `plot`.
    """
    for method, group in by_method(runs).items():
        measured = [(run, pair) for run in group if (pair := run.pair(after, task)) is not None]
        samples = [losses for _, pair in measured for losses in pair.losses]
        if samples:
            every = max(1, len(samples[0]) // markers)
            plot_curve(axes, alphas_of(measured[0][0]), samples, method, markevery=every, **options)


def alphas_of(run: FinishedRun) -> list[float]:
    """The values of α at which a run's landscape was measured."""
    assert run.landscape is not None  # checked before drawing
    return list(run.landscape.settings.alphas)


def label_profile_axes(axes: Any, *, loss: bool) -> None:
    """Label axes that show the loss against α; of several panels only the first names the loss."""
    axes.set_xlabel("α")
    axes.set_ylabel("training loss" if loss else "")
    axes.grid(axis="y")
