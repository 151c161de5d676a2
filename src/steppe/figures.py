"""Figures from saved runs; nothing here trains. Needs matplotlib: `pip install steppe[figures]`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steppe.errors import RunError, UsageError
from steppe.files import write_whole, writing

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
_LINES = ("-", "--", ":", "-.")  # another for each round of colours
_SUFFIXES = (".png", ".pdf", ".svg")


def forgetting(results: Sequence[dict[str, Any]], out: Path) -> None:
    """How accuracy goes as tasks are learnt: left the first task alone, right the mean over all tasks so far.

    Runs of one method are averaged, with a band of one standard deviation over seeds.
    """
    pyplot = _pyplot()
    if out.suffix not in _SUFFIXES:
        raise UsageError(f"{out}: a figure is written as {', '.join(_SUFFIXES)}.")
    if any(not result["accuracy"] for result in results):
        raise UsageError("a run without a single task: there is nothing to draw.")
    drawn = [result for result in results if all(row[0] is not None for row in result["accuracy"])]
    if not drawn:
        raise UsageError("none of these runs learnt its tasks one after another: there is no forgetting to draw.")
    methods = dict.fromkeys(result["method"] for result in drawn)
    if len({len(result["accuracy"]) for result in drawn}) != 1:
        raise UsageError("the runs have different numbers of tasks: draw them apart.")
    figure, (first, average) = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for place, method in enumerate(methods):
        matrices = [result["accuracy"] for result in drawn if result["method"] == method]
        colour = _COLOURS[place % len(_COLOURS)]
        line = _LINES[place // len(_COLOURS) % len(_LINES)]
        _curve(first, [[row[0] for row in matrix] for matrix in matrices], method, colour, line)
        means = [[sum(row[: i + 1]) / (i + 1) for i, row in enumerate(matrix)] for matrix in matrices]
        _curve(average, means, method, colour, line)
    first.set_title("the first task, as others follow", fontsize=10)
    average.set_title("mean over all tasks learnt so far", fontsize=10)
    first.set_ylabel("test accuracy (%)")
    for axes in (first, average):
        axes.set_xlabel("tasks learnt")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    average.legend(frameon=False, fontsize=9)
    figure.suptitle(f"Forgetting on {results[0]['benchmark']}", fontsize=11)
    drawing = io.BytesIO()
    try:
        figure.savefig(drawing, format=out.suffix.removeprefix("."), dpi=150)
    finally:
        pyplot.close(figure)
    with writing(out):
        write_whole(out, drawing.getvalue())


def _curve(axes: Any, curves: list[list[float]], label: str, colour: str, line: str) -> None:
    count, steps = len(curves), range(1, len(curves[0]) + 1)
    mean = [sum(values) / count for values in zip(*curves, strict=True)]
    axes.plot(steps, mean, marker="o", markersize=3, label=label, color=colour, linestyle=line)
    if count > 1:
        spread = [
            (sum((value - middle) ** 2 for value in values) / (count - 1)) ** 0.5
            for middle, values in zip(mean, zip(*curves, strict=True), strict=True)
        ]
        low = [middle - width for middle, width in zip(mean, spread, strict=True)]
        high = [middle + width for middle, width in zip(mean, spread, strict=True)]
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise RunError("figures need matplotlib: pip install 'steppe[figures]'.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


FIGURES = {"forgetting": forgetting}
