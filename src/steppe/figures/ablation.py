"""The ablation: ACC and BWT of FS-DGPM and of its variants without some of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import add_legend, cut_axis, plot_bars
from steppe.figures.style import BLACK, PAGE, escape_text, new_figure
from steppe.report.finished_run import FinishedRun, benchmarks_of, by_method, methods_of, on_benchmark
from steppe.results.tables import rows

_FAMILY = ("gpm", "sgp", "dgpm", "la-dgpm", "fs-gpm", "fs-dgpm", "fs-sgpm", "fs-rgpm")
_NAMES = {"acc": "ACC (%)", "bwt": "BWT (%)"}
_MARKS = {"paper": ("D", "paper"), "released": ("o", "released code")}


def plot_measure(axes: Any, runs: Sequence[FinishedRun], measure: str) -> None:
    """Plot ACC or BWT as bars, with marks for the figures of the paper and its released code.

    Args:
        axes: Where to plot.
        runs: Runs of one benchmark.
        measure: `acc` or `bwt`.
    """
    found = {row.method: row for row in rows([run.result for run in runs])}
    samples = {
        method: [value for run in group if (value := getattr(run.result, measure)) is not None]
        for method, group in by_method(runs).items()
    }
    samples = {method: values for method, values in samples.items() if values}
    plot_bars(axes, samples, _NAMES[measure])
    ends = []
    for place, method in enumerate(samples):
        row = found[method]
        for offset, (source, (marker, name)) in zip((-0.14, 0.14), _MARKS.items(), strict=True):
            figure = getattr(row, source).get(measure)
            if figure is None:
                continue
            axes.errorbar(
                place + offset,
                figure.mean,
                yerr=figure.std,
                fmt=marker,
                color=BLACK,
                markerfacecolor="white",
                markersize=3.5,
                linewidth=0.7,
                capsize=1.2,
                label=name,
            )
            ends += [figure.mean - (figure.std or 0), figure.mean + (figure.std or 0)]
        own = getattr(row, measure)
        ends += [own.mean - (own.std or 0), own.mean + (own.std or 0)]
    cut_axis(axes, min(ends), max(ends))


def _shown(runs: Sequence[FinishedRun], choices: Choices) -> list[FinishedRun]:
    if choices.methods is not None:
        return list(runs)
    return [run for method in _FAMILY for run in runs if run.method == method]


def _draw(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    shown = _shown(runs, choices)
    names = benchmarks_of(shown)
    figure = new_figure(PAGE, 0.4 + 1.9 * len(names))
    panels = figure.subplots(len(names), 2, squeeze=False)
    for row, name in zip(panels, names, strict=True):
        for axes, measure in zip(row, _NAMES, strict=True):
            plot_measure(axes, on_benchmark(shown, name), measure)
            axes.set_title(escape_text(name))
    if any(axes.get_legend_handles_labels()[1] for axes in panels.flat):
        add_legend(figure, panels.flat)
    return figure


def _missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    shown = _shown(runs, choices)
    if len(methods_of(shown)) < 2:
        return [f"runs of two or more of {', '.join(_FAMILY)} (others: --methods)"]
    return checks.same_tasks_per_benchmark(shown) or checks.have_bwt(shown)


ABLATION = Figure(
    "ablation",
    "ACC and BWT of FS-DGPM's family, with the figures of the paper and its released code.",
    f"runs of {', '.join(_FAMILY)}, or of --methods; of any number of benchmarks",
    _draw,
    _missing,
)
