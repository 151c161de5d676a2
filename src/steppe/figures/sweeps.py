"""One setting varied: the number of ascent steps, the size of the replay buffer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import add_legend, add_titles
from steppe.figures.style import PAGE, display_name, new_figure, style_of
from steppe.report.finished_run import FinishedRun, by_method, training_times
from steppe.results.statistics import mean_std

Measure = Callable[[FinishedRun], float]


@dataclass(frozen=True)
class _Panel:
    """One panel: a measure (None: training time) against the setting, or against `x` if given."""

    y_label: str
    measure: Measure | None
    title: str
    x: Measure | None = None
    x_label: str = ""


def _acc(run: FinishedRun) -> float:
    return run.result.acc


def _bwt(run: FinishedRun) -> float:
    assert run.result.bwt is not None  # checked before drawing
    return run.result.bwt


def _kilobytes(run: FinishedRun) -> float:
    return run.result.kept_bytes / 1000


def _varied(runs: Sequence[FinishedRun], setting: str) -> list[FinishedRun]:
    """The runs of methods that were run with several values of a setting."""
    return [
        run
        for group in by_method([run for run in runs if run.setting(setting) is not None]).values()
        if len({run.setting(setting) for run in group}) > 1
        for run in group
    ]


def _label_and_measure(panel: _Panel, runs: Sequence[FinishedRun]) -> tuple[str, Measure]:
    if panel.measure is not None:
        return panel.y_label, panel.measure
    times, seconds = training_times(runs)
    return f"{panel.y_label} ({seconds} per task)", lambda run: times[run.path]


def _plot_lines(axes: Any, runs: Sequence[FinishedRun], setting: str, x: Measure | None, measure: Measure) -> None:
    """Plot each method's mean at each value of the setting, with one standard deviation over seeds."""
    for method, group in by_method(runs).items():
        values = sorted({run.setting(setting) for run in group})
        by_value = [[run for run in group if run.setting(setting) == value] for value in values]
        points = [point for same in by_value if (point := mean_std(map(measure, same)))]
        style = style_of(method)
        axes.errorbar(
            values if x is None else [statistics.fmean(map(x, same)) for same in by_value],
            [point.mean for point in points],
            yerr=[point.std or 0.0 for point in points],
            color=style.color,
            marker=style.marker,
            linestyle=style.line,
            label=display_name(method),
            capsize=1.8,
            elinewidth=0.8,
        )
    axes.grid(axis="y")


def _sweep(name: str, text: str, setting: str, x_label: str, panels: Sequence[_Panel], *, log: bool) -> Figure:
    def plot(runs: Sequence[FinishedRun], choices: Choices) -> Any:
        shown = _varied(runs, setting)
        figure = new_figure(PAGE * len(panels) / 3, 2.2)
        all_axes = figure.subplots(1, len(panels))
        values = sorted({run.setting(setting) for run in shown})
        for axes, panel in zip(all_axes, panels, strict=True):
            y_label, measure = _label_and_measure(panel, shown)
            _plot_lines(axes, shown, setting, panel.x, measure)
            if log:
                axes.set_xscale("log")
            if panel.x is None:
                axes.set_xticks(values, [f"{value:g}" for value in values])
                axes.minorticks_off()
            axes.margins(x=0.1)
            axes.set_xlabel(panel.x_label or x_label)
            axes.set_ylabel(y_label)
        add_titles(all_axes, [panel.title for panel in panels])
        add_legend(figure, all_axes)
        return figure

    def missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
        shown = _varied(runs, setting)
        if not shown:
            values = sorted({run.setting(setting) for run in runs if run.setting(setting) is not None})
            known = f"only {', '.join(map(str, values))}" if values else "none of these methods has it"
            command = f"steppe study {runs[0].benchmark} fs-dgpm --set {setting}=VALUE --out OTHER"
            return [f"runs of one method with different {setting} ({known}): run {command}"]
        return checks.have_bwt(shown) or checks.same_tasks(shown, varied=setting)

    return Figure(name, text, f"runs of one benchmark that differ in {setting} alone", plot, missing)


ASCENT_STEPS = _sweep(
    "ascent-steps",
    "ACC, BWT and training time against the number of ascent steps K.",
    "ascent_steps",
    "ascent steps K",
    (
        _Panel("ACC (%)", _acc, "ACC"),
        _Panel("BWT (%)", _bwt, "BWT"),
        _Panel("training time", None, "training time"),
    ),
    log=False,
)
MEMORY_SIZE = _sweep(
    "memory-size",
    "ACC and BWT against the size of the replay buffer, and ACC against all memory.",
    "buffer",
    "samples in the replay buffer",
    (
        _Panel("ACC (%)", _acc, "ACC"),
        _Panel("BWT (%)", _bwt, "BWT"),
        _Panel("ACC (%)", _acc, "ACC vs. memory", _kilobytes, "kept besides the network (kB)"),
    ),
    log=True,
)
