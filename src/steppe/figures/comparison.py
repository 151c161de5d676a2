"""The paper's Figure 4: accuracy against tasks learned, time per task, memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import add_legend, add_titles, plot_bars, plot_mean_accuracy
from steppe.figures.style import BLACK, PAGE, display_name, escape_text, new_figure, style_of
from steppe.report.finished_run import FinishedRun, benchmarks_of, by_method, methods_of, on_benchmark, training_times

_HATCHES = ("", "////", "....", "xxxx", "----")
_MIB = 2**20


def _draw(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    names = benchmarks_of(runs)
    first = on_benchmark(runs, names[0])
    count = len(methods_of(runs))
    figure = new_figure(PAGE, 1.5 + 0.1 * max(count, 8) + 0.13 * count * (len(names) - 1) * 0.5)
    panels = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    plot_mean_accuracy(panels[0], first)
    times, seconds = training_times(first)
    plot_bars(
        panels[1],
        {method: [times[run.path] for run in own] for method, own in by_method(first).items()},
        f"{seconds} per task",
        horizontal=True,
    )
    _memory(panels[2], runs, names)
    where = escape_text(names[0])
    add_titles(panels, [f"accuracy, {where}", f"training time, {where}", "memory: kept, and (pale) working"])
    add_legend(figure, panels[:1], _legend_patches(names))
    return figure


def _memory(axes: Any, runs: Sequence[FinishedRun], names: Sequence[str]) -> None:
    """Plot the memory that each method keeps between tasks, and in a pale color that which can be rebuilt from it; one
    bar for each benchmark.
    """
    every = methods_of(runs)
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        own = by_method(on_benchmark(runs, name))
        places = [every.index(method) + (number - (len(names) - 1) / 2) * height for method in own]
        colors = [style_of(method).color for method in own]
        kept = [statistics.fmean(run.result.kept_bytes / _MIB for run in runs) for runs in own.values()]
        working = [statistics.fmean(run.result.working_bytes / _MIB for run in runs) for runs in own.values()]
        axes.barh(
            places,
            kept,
            height=0.9 * height,
            color=colors,
            edgecolor=BLACK,
            alpha=0.75,
            hatch=_HATCHES[number % len(_HATCHES)],
            label=escape_text(name),
        )
        if any(working):
            axes.barh(places, working, left=kept, height=0.9 * height, color=colors, edgecolor=BLACK, alpha=0.2)
    axes.set_yticks(range(len(every)), [display_name(method) for method in every])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_xlabel("MiB")


def _legend_patches(names: Sequence[str]) -> dict[str, Any]:
    """Legend handles that show which benchmark a bar belongs to, if there are several."""
    from matplotlib.patches import Patch

    if len(names) < 2:
        return {}
    return {
        escape_text(name): Patch(facecolor="white", edgecolor=BLACK, hatch=_HATCHES[number % len(_HATCHES)])
        for number, name in enumerate(names)
    }


def _missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    return checks.same_tasks_per_benchmark(runs)


COMPARISON = Figure(
    "comparison",
    "The paper's Figure 4: average accuracy against tasks learned, time per task, memory.",
    "runs of one benchmark; of further benchmarks only memory is shown",
    _draw,
    _missing,
)
