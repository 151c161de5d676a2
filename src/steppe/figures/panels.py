"""Pieces that figures are put together from: curves with bands, bars with marks, legends."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steppe.figures.style import BLACK, MethodStyle, display_name, style_of
from steppe.report.finished_run import FinishedRun, by_method

BAND = 0.18
"""How opaque a band of one standard deviation is."""


def mean_and_spread(samples: Sequence[Sequence[float]]) -> tuple[list[float], list[float] | None]:
    """Mean and sample standard deviation at each place, over samples of equal length; one sample has no spread."""
    mean = [statistics.fmean(values) for values in zip(*samples, strict=True)]
    if len(samples) < 2:
        return mean, None
    return mean, [statistics.stdev(values) for values in zip(*samples, strict=True)]


def plot_curve(
    axes: Any, steps: Sequence[float], samples: Sequence[Sequence[float]], method: str, **options: Any
) -> None:
    """A method's mean as a line, with a band of one standard deviation."""
    own: MethodStyle = style_of(method)
    mean, spread = mean_and_spread(samples)
    settings = {
        "marker": own.marker,
        "linestyle": own.line,
        "color": own.color,
        "label": display_name(method),
        **options,
    }
    axes.plot(steps, mean, **settings)
    if spread is not None:
        low = [middle - width for middle, width in zip(mean, spread, strict=True)]
        high = [middle + width for middle, width in zip(mean, spread, strict=True)]
        axes.fill_between(steps, low, high, color=own.color, alpha=BAND, linewidth=0)


def plot_task_accuracy(axes: Any, runs: Sequence[FinishedRun], task: int) -> None:
    """A task's test accuracy as others follow, for the methods that learn them one by one."""
    for method, own in by_method([run for run in runs if run.is_incremental]).items():
        plot_curve(axes, range(task, own[0].num_tasks + 1), [run.accuracy_of(task) for run in own], method)
    label_task_axis(axes, "test accuracy (%)")


def plot_mean_accuracy(axes: Any, runs: Sequence[FinishedRun]) -> None:
    """The mean over all tasks so far; where tasks are learnt together, a level line at what came of it."""
    for method, own in by_method(runs).items():
        if all(run.is_incremental for run in own):
            plot_curve(axes, range(1, own[0].num_tasks + 1), [run.mean_accuracies() for run in own], method)
        else:
            level = [[run.result.acc] * 2 for run in own]
            plot_curve(axes, (1, own[0].num_tasks), level, method, marker="")
    label_task_axis(axes, "average accuracy (%)")


def label_task_axis(axes: Any, measure: str) -> None:
    """Axes of something against the number of tasks learnt."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("tasks learnt")
    axes.set_ylabel(measure)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def plot_bars(axes: Any, samples: dict[str, list[float]], measure: str, *, lengthwise: bool = False) -> None:
    """A bar for each method: the mean over its values, with one standard deviation; it is named beside the axis."""
    places = list(range(len(samples)))
    means = [statistics.fmean(values) for values in samples.values()]
    spreads = [statistics.stdev(values) if len(values) > 1 else math.nan for values in samples.values()]
    settings = {
        "color": [style_of(method).color for method in samples],
        "edgecolor": BLACK,
        "alpha": 0.75,
        "error_kw": {"linewidth": 0.8, "capsize": 1.8, "capthick": 0.8},
    }
    names = [display_name(method) for method in samples]
    if lengthwise:
        axes.barh(places, means, xerr=spreads, height=0.7, **settings)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.set_xlabel(measure)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
    else:
        axes.bar(places, means, yerr=spreads, width=0.7, **settings)
        slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(names) > 3 else {}
        axes.set_xticks(places, names, **slanted)
        axes.set_ylabel(measure)
        axes.grid(axis="y")
        axes.tick_params(axis="x", length=0)


def cut_axis(axes: Any, low: float, high: float) -> None:
    """Cut a bar chart's axis to where the values are, so that differences can be seen, and say so; 0 stays if it is
    near.
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
    """One legend for all panels, below them, where it hides nothing; with more handles by their names."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    entries |= more or {}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(6, len(entries)))


def add_titles(panels: Sequence[Any], titles: Sequence[str]) -> None:
    """Name panels (a), (b), ... with what each shows."""
    for place, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        axes.set_title(f"({chr(ord('a') + place)}) {title}")


def middle_task(tasks: int) -> int:
    """The paper looks at the fifth task of ten; of fewer than six, at the one in the middle."""
    return 5 if tasks > 5 else (tasks + 1) // 2


def plot_profile(
    axes: Any, runs: Sequence[FinishedRun], after: int, task: int, *, markers: int = 8, **options: Any
) -> None:
    """The loss g(α) of a task around the weights after another one, of every method; bands are over directions, some
    markers along each line tell it from others in grey.
    """
    for method, own in by_method(runs).items():
        measured = [run for run in own if run.pair(after, task) is not None]
        samples = [losses for run in measured for losses in run.pair(after, task).losses]  # type: ignore[union-attr]
        if samples:
            every = max(1, len(samples[0]) // markers)
            plot_curve(axes, alphas_of(measured[0]), samples, method, markevery=every, **options)


def alphas_of(run: FinishedRun) -> list[float]:
    """Where a run's landscape was measured."""
    assert run.landscape is not None  # asked for before
    return list(run.landscape.settings.alphas)


def label_profile_axes(axes: Any, *, measure: bool) -> None:
    """Axes of the loss against α; the loss is named on the first panel of several."""
    axes.set_xlabel("α")
    axes.set_ylabel("training loss" if measure else "")
    axes.grid(axis="y")
