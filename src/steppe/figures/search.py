"""What mattered in a search: the importance of each setting, and the score against its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from steppe.figures.style import BLUE, ORANGE, PAGE, VERMILLION, escape_text, matplotlib_style, new_figure

_ACROSS = 3
_HEIGHT = 1.7  # of a panel, in inches


def draw_search(data: Mapping[str, Any]) -> Any:
    """Draw the importances of the settings, and a panel per setting with every trial.

    Args:
        data: The content of a search's trials.json.

    Returns:
        A matplotlib figure.

    Raises:
        RunError: matplotlib is not installed.
    """
    with matplotlib_style():
        space, importances = data["space"], data["importances"]
        names = sorted(space, key=lambda name: -importances.get(name, 0.0))
        panels = len(names) + bool(importances)
        columns = min(_ACROSS, panels)
        rows = math.ceil(panels / columns)
        figure = new_figure(PAGE * columns / _ACROSS, _HEIGHT * rows)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        if importances:
            _draw_importances(axes.pop(0), [(name, importances.get(name, 0.0)) for name in names])
        for place, name in enumerate(names):
            panel = axes.pop(0)
            _draw_slice(panel, name, space[name], data)
            if place == 0:
                panel.legend()
        for unused in axes:
            unused.set_axis_off()
        return figure


def _draw_importances(axes: Any, importances: Sequence[tuple[str, float]]) -> None:
    axes.barh([escape_text(name) for name, _ in importances], [value for _, value in importances], color=BLUE)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("share of the differences explained")
    axes.set_title("importance")


def _draw_slice(axes: Any, name: str, tried: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Plot the scores against the values of one setting: complete trials, those ended early, and the best."""
    labels = list(map(str, tried["values"]))

    def points(state: str) -> tuple[list[Any], list[float]]:
        shown = [(_score(trial), trial["values"]) for trial in data["trials"] if trial["state"] == state]
        found = [(values[name], score) for score, values in shown if score is not None and name in values]
        return [labels.index(str(value)) if labels else value for value, _ in found], [score for _, score in found]

    axes.plot(*points("pruned"), linestyle="", marker="x", color=ORANGE, label="ended early")
    axes.plot(*points("complete"), linestyle="", marker="o", color=BLUE, label="complete")
    best = next(trial for trial in data["trials"] if trial["number"] == data["best"])
    place = labels.index(str(best["values"][name])) if labels else best["values"][name]
    axes.plot([place], [best["score"]], linestyle="", marker="*", markersize=7, color=VERMILLION, label="best")
    if labels:
        axes.set_xticks(range(len(labels)), [escape_text(label) for label in labels])
    elif tried["log"]:
        axes.set_xscale("log")
    axes.set_xlabel(escape_text(name))
    axes.set_ylabel(escape_text(data["measure"]))


def _score(trial: Mapping[str, Any]) -> float | None:
    """The objective; for a trial that was ended early, its mean over the tasks it saw last."""
    if trial["score"] is not None:
        return float(trial["score"])
    scores = {int(tasks): score for tasks, score in trial["scores"].items()}
    return scores[max(scores)] if scores else None
