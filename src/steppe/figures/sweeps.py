"""One setting varied: the steps of the perturbation, the size of the replay buffer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import legend, letter
from steppe.figures.reading import Run, by_method
from steppe.figures.style import PAGE, label, look, new_figure

Measure = Callable[[Run], float]


def _acc(run: Run) -> float:
    return float(run.result["acc"])


def _bwt(run: Run) -> float:
    return float(run.result["bwt"])


def _seconds(run: Run) -> float:
    return run.seconds_per_task


def _varied(runs: Sequence[Run], setting: str) -> list[Run]:
    """The runs of methods of which there are runs with different values of a setting."""
    return [
        run
        for own in by_method([run for run in runs if run.setting(setting) is not None]).values()
        if len({run.setting(setting) for run in own}) > 1
        for run in own
    ]


def _lines(axes: Any, runs: Sequence[Run], setting: str, measure: Measure) -> None:
    """A method's mean at each value, with a bar of one standard deviation over seeds."""
    for method, own in by_method(runs).items():
        values = sorted({run.setting(setting) for run in own})
        samples = [[measure(run) for run in own if run.setting(setting) == value] for value in values]
        style = look(method)
        axes.errorbar(
            values,
            [statistics.fmean(found) for found in samples],
            yerr=[statistics.stdev(found) if len(found) > 1 else 0.0 for found in samples],
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            label=label(method),
            capsize=1.8,
            elinewidth=0.8,
        )
    axes.grid(axis="y")


def _figure(name: str, text: str, setting: str, axis: str, measures: dict[str, Measure], *, log: bool) -> Figure:
    def draw(runs: Sequence[Run], choices: Choices) -> Any:
        shown = _varied(runs, setting)
        figure = new_figure(PAGE * len(measures) / 3, 2.2)
        panels = figure.subplots(1, len(measures))
        values = sorted({run.setting(setting) for run in shown})
        for axes, (words, measure) in zip(panels, measures.items(), strict=True):
            _lines(axes, shown, setting, measure)
            if log:
                axes.set_xscale("log")
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()
            axes.margins(x=0.1)
            axes.set_xlabel(axis)
            axes.set_ylabel(words)
        letter(panels, [words.split(" (")[0] for words in measures])
        legend(figure, panels)
        return figure

    def missing(runs: Sequence[Run], choices: Choices) -> list[str]:
        shown = _varied(runs, setting)
        if not shown:
            there = sorted({run.setting(setting) for run in runs if run.setting(setting) is not None})
            given = f"there is {', '.join(map(str, there))} alone" if there else "none of these methods has it"
            remedy = f"steppe study {runs[0].benchmark} fs-dgpm --set {setting}=VALUE --out OTHER"
            return [f"runs of one method with different {setting} ({given}): run {remedy}"]
        lacking = [run.method for run in shown if run.result["bwt"] is None]
        if lacking:
            return [f"methods that learn tasks one by one ({lacking[0]} does not: choose others by --methods)"]
        return checks.one_stream(shown, but=setting)

    return Figure(name, text, f"runs of one benchmark that differ in {setting} alone", draw, missing)


ASCENT_STEPS = _figure(
    "ascent-steps",
    "ACC, BWT and time against the steps K of the perturbation.",
    "ascent_steps",
    "ascent steps K",
    {"ACC (%)": _acc, "BWT (%)": _bwt, "training time (s per task)": _seconds},
    log=False,
)
MEMORY_SIZE = _figure(
    "memory-size",
    "ACC and BWT against the size of the replay buffer.",
    "buffer",
    "samples in the replay buffer",
    {"ACC (%)": _acc, "BWT (%)": _bwt},
    log=True,
)
