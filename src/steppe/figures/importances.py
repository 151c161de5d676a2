"""The contents of gradient memories: the importances λ of their directions, and the number of directions (rank).

Both are recorded when a task ends. The rank is that of the basis for the next task. So is λ where bases grow (SGP).
Where bases are rebuilt, λ belongs to the basis the task was learned with, whose rank was recorded one task earlier.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from steppe.figures import checks
from steppe.figures.figure import Choices, Figure
from steppe.figures.panels import add_legend, label_task_axis, plot_curve
from steppe.figures.style import PAGE, display_name, escape_text, new_figure, style_of
from steppe.report.finished_run import FinishedRun, by_method, methods_of

_NESTED = ((0, 10, 0.12), (1, 9, 0.16), (2, 8, 0.2), (3, 7, 0.24), (4, 6, 0.28))
"""Bands: two deciles and the opacity between them."""


def _with(runs: Sequence[FinishedRun], kind: str) -> list[FinishedRun]:
    return [run for run in runs if any(record.get(kind) for record in _records(run))]


def _layers(runs: Sequence[FinishedRun], kind: str) -> list[str]:
    return list(
        dict.fromkeys(
            layer for run in runs for record in run.log.diagnostics.values() for layer in record.get(kind, {})
        )
    )


def _records(run: FinishedRun) -> list[dict[str, Any]]:
    """The diagnostics after each task, in order."""
    recorded = run.log.diagnostics
    return [recorded[place] for place in range(run.num_tasks) if place in recorded]


def _of_basis_before(runs: Sequence[FinishedRun]) -> bool:
    """Whether λ belongs to the basis each task was learned with: the first task had none, so no λ was recorded."""
    return not any(run.log.diagnostics[0].get("importances") for run in runs)


def _deciles(axes: Any, runs: Sequence[FinishedRun], layer: str) -> None:
    """Plot bands between deciles of λ and the median as a line, as means over seeds."""
    own = style_of(runs[0].method)
    steps = [
        place
        for place in range(runs[0].num_tasks)
        if all(layer in run.log.diagnostics[place].get("importances", {}) for run in runs)
    ]
    tables = [[run.log.diagnostics[place]["importances"][layer]["deciles"] for place in steps] for run in runs]
    deciles = [
        [statistics.fmean(table[row][rank] for table in tables) for row in range(len(steps))] for rank in range(11)
    ]
    x = [place + 1 for place in steps]
    for low, high, opacity in _NESTED:
        axes.fill_between(x, deciles[low], deciles[high], color=own.color, alpha=opacity, linewidth=0)
    axes.plot(x, deciles[5], color=own.color, linestyle=own.line, label="_median")
    label_task_axis(axes, "")
    axes.set_xlabel("")
    axes.set_ylim(-0.03, 1.05)


def _ranks(axes: Any, runs: Sequence[FinishedRun], layer: str) -> None:
    size = 0
    for method, own in by_method(_with(runs, "ranks")).items():
        # A layer that has no basis after a task is missing from the record.
        samples = [[record.get("ranks", {}).get(layer, {}).get("rank", 0) for record in _records(run)] for run in own]
        of = [
            record["ranks"][layer]["of"] for run in own for record in _records(run) if layer in record.get("ranks", {})
        ]
        if of:
            plot_curve(axes, range(1, len(samples[0]) + 1), samples, method, markersize=2.5)
            size = max(size, *of)
    axes.axhline(size, color="0.5", linewidth=0.6)
    label_task_axis(axes, "")
    axes.set_ylim(0, 1.06 * size)


def _draw(runs: Sequence[FinishedRun], choices: Choices) -> Any:
    soft = by_method(_with(runs, "importances"))
    layers = _layers(runs, "ranks")
    figure = new_figure(PAGE, 0.85 * len(soft) + 2.0)
    panels = figure.subplots(
        len(soft) + 1, len(layers), sharex=True, squeeze=False, height_ratios=[1.0] * len(soft) + [1.5]
    )
    for row, (method, own) in zip(panels, soft.items(), strict=False):
        for axes, layer in zip(row, layers, strict=True):
            _deciles(axes, own, layer)
            axes.tick_params(labelleft=axes is row[0])
        row[0].set_ylabel(f"λ, {display_name(method)}\nbasis {'before' if _of_basis_before(own) else 'after'}")
    for axes, layer in zip(panels[0], layers, strict=True):
        axes.set_title(escape_text(layer.removesuffix(".weight")))
    for axes, layer in zip(panels[-1], layers, strict=True):
        _ranks(axes, runs, layer)
    panels[-1][0].set_ylabel("rank of the basis after")
    add_legend(figure, panels[-1])
    return figure


def _missing(runs: Sequence[FinishedRun], choices: Choices) -> list[str]:
    if problems := checks.same_tasks(runs):
        return problems
    if not _with(runs, "importances"):
        return [
            f"importances in the log.jsonl of a run ({', '.join(methods_of(runs))}: none of these records λ; "
            "fs-dgpm and its family do)"
        ]
    partial = [run for run in _with(runs, "ranks") if len(_records(run)) != run.num_tasks]
    return [f"a record of each of its {run.num_tasks} tasks in {run.path / 'log.jsonl'}" for run in partial[:1]]


IMPORTANCES = Figure(
    "importances",
    "Importances λ per layer at the end of each task (bands between deciles), and the ranks of the bases.",
    "log.jsonl of methods with importances (fs-dgpm, fs-gpm, fs-sgpm, fs-rgpm, dgpm, la-dgpm, sgp); ranks of gpm too",
    _draw,
    _missing,
)
