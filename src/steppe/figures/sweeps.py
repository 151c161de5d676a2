"""One setting varied: the steps of the perturbation, the size of the replay buffer."""

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

Measure = Callable[[FinishedRun], float]


@dataclass(frozen=True)
class _Panel:
    """What is drawn upwards, time where there is no measure, and against what if not the setting."""

    words: str
    measure: Measure | None
    title: str
    place: Measure | None = None
    axis: str = ""


def _acc(run: FinishedRun) -> float:
    return run.result.acc


def _bwt(run: FinishedRun) -> float:
    assert run.result.bwt is not None  # checked before drawing
    return run.result.bwt


def _kilobytes(run: FinishedRun) -> float:
    return run.result.memory_bytes / 1000


def _varied(runs: Sequence[FinishedRun], setting: str) -> list[FinishedRun]:
    """The runs of methods of which there are runs with different values of a setting."""
    return [
        run
        for own in by_method([run for run in runs if run.setting(setting) is not None]).values()
        if len({run.setting(setting) for run in own}) > 1
        for run in own
    ]


def _measured(panel: _Panel, runs: Sequence[FinishedRun]) -> tuple[str, Measure]:
    """What the panel is labelled with, and the measure of each run."""
    if panel.measure is not None:
        return panel.words, panel.measure
    times, seconds = training_times(runs)
    return f"{panel.words} ({seconds} per task)", lambda run: times[run.path]


def _lines(axes: Any, runs: Sequence[FinishedRun], setting: str, place: Measure | None, measure: Measure) -> None:
    """A method's mean at each value, with a bar of one standard deviation over seeds."""
    for method, own in by_method(runs).items():
        values = sorted({run.setting(setting) for run in own})
        of_value = [[run for run in own if run.setting(setting) == value] for value in values]
        samples = [[measure(run) for run in found] for found in of_value]
        style = style_of(method)
        axes.errorbar(
            values if place is None else [statistics.fmean(map(place, found)) for found in of_value],
            [statistics.fmean(found) for found in samples],
            yerr=[statistics.stdev(found) if len(found) > 1 else 0.0 for found in samples],
            color=style.color,
            marker=style.marker,
            linestyle=style.line,
            label=display_name(method),
            capsize=1.8,
            elinewidth=0.8,
        )
    axes.grid(axis="y")


def _figure(name: str, text: str, setting: str, axis: str, panels: Sequence[_Panel], *, log: bool) -> Figure:
    def draw(runs: Sequence[FinishedRun], choices: Choices) -> Any:
        shown = _varied(runs, setting)
        figure = new_figure(PAGE * len(panels) / 3, 2.2)
        drawn = figure.subplots(1, len(panels))
        values = sorted({run.setting(setting) for run in shown})
        for axes, panel in zip(drawn, panels, strict=True):
            words, measure = _measured(panel, shown)
            _lines(axes, shown, setting, panel.place, measure)
            if log:
                axes.set_xscale("log")
            if panel.place is None:
                axes.set_xticks(values, [f"{value:g}" for value in values])
                axes.minorticks_off()
            axes.margins(x=0.1)
            axes.set_xlabel(panel.axis or axis)
            axes.set_ylabel(words)
        add_titles(drawn, [panel.title for panel in panels])
        add_legend(figure, drawn)
        return figure

    def missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
        shown = _varied(runs, setting)
        if not shown:
            there = sorted({run.setting(setting) for run in runs if run.setting(setting) is not None})
            given = f"there is {', '.join(map(str, there))} alone" if there else "none of these methods has it"
            remedy = f"steppe study {runs[0].benchmark} fs-dgpm --set {setting}=VALUE --out OTHER"
            return [f"runs of one method with different {setting} ({given}): run {remedy}"]
        lacking = [run.method for run in shown if run.result.bwt is None]
        if lacking:
            return [f"methods that learn tasks one by one ({lacking[0]} does not: choose others by --methods)"]
        return checks.same_tasks(shown, but=setting)

    return Figure(name, text, f"runs of one benchmark that differ in {setting} alone", draw, missing)


ASCENT_STEPS = _figure(
    "ascent-steps",
    "ACC, BWT and time against the steps K of the perturbation.",
    "ascent_steps",
    "ascent steps K",
    (
        _Panel("ACC (%)", _acc, "ACC"),
        _Panel("BWT (%)", _bwt, "BWT"),
        _Panel("training time", None, "training time"),
    ),
    log=False,
)
MEMORY_SIZE = _figure(
    "memory-size",
    "ACC and BWT against the size of the replay buffer, and ACC against all that is kept.",
    "buffer",
    "samples in the replay buffer",
    (
        _Panel("ACC (%)", _acc, "ACC"),
        _Panel("BWT (%)", _bwt, "BWT"),
        _Panel("ACC (%)", _acc, "ACC for the bytes", _kilobytes, "kB kept: samples, bases and all"),
    ),
    log=True,
)
