"""A study in detail: beside the accuracies, ranks of the bases, importances, time and memory of each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from steppe.results.log import final_diagnostics
from steppe.results.published import Figure, notes_on_marks
from steppe.results.schema import is_number
from steppe.results.tables import SECONDS, Result, Row, notes_on_runs, row_of, seconds_per_task, timed_by, variants

_HEADER = (
    *("method", "seeds", "ACC", "BWT", "paper ACC", "paper BWT", "learning accuracy", "forgetting"),
    "forward transfer",
    *("ranks", "λ", "λ, first decile", "s / task", "kB"),
)
_NOTE = (
    "Mean ± standard deviation over seeds, in percent. At the end of the stream: ranks of the bases of how many "
    "directions, layer by layer; λ, the mean importance over layers, and the value that a tenth of a layer's "
    "directions lie below, in the layer where that is least, as the last task left it: of the basis it was learnt "
    "with, for SGP of the basis it made grow; what is kept beside the network, in kilobytes. {seconds} of "
    "learning, without testing, for each task."
)


def details(runs: Mapping[Path, Result]) -> str:
    """The table of all runs of one benchmark in Markdown; what a method does not have is left open, what none has is
    left out.
    """
    body, paths, results = [], list(runs), list(runs.values())
    measure = timed_by(results)
    for label, places in variants(results).items():
        own = {paths[place]: results[place] for place in places}
        body.append(_cells(row_of(label, list(own.values()), measure), own, measure))
    kept = [column for column in range(len(_HEADER)) if any(cells[column] for cells in body)]
    lines = [[cells[column] for column in kept] for cells in (_HEADER, ["---"] * len(_HEADER), *body)]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return (
        "\n".join(
            [
                *table,
                "",
                _NOTE.format(seconds=SECONDS[measure][0].upper() + SECONDS[measure][1:]),
                *notes_on_runs(results),
                *notes_on_marks("".join(table)),
            ]
        )
        + "\n"
    )


def _cells(row: Row, runs: Mapping[Path, Result], measure: str) -> Sequence[str]:
    told = [final_diagnostics(path, len(result["accuracy"])) for path, result in runs.items()]
    means, lowest = _importances(told)
    return (
        row.method,
        str(len(row.seeds)),
        *map(_text, (row.acc, row.bwt, row.paper.get("acc"), row.paper.get("bwt"), row.learning_acc, row.forgetting)),
        _text(row.forward_transfer),
        _ranks(told),
        _share(means),
        _share(lowest),
        _short(fmean(seconds_per_task(result, measure) for result in runs.values())),
        f"{fmean(sum(result['bytes'].values()) for result in runs.values()) / 1000:.0f}",
    )


def _ranks(told: Sequence[Mapping[str, Any]]) -> str:
    """The ranks of each layer, means over seeds to the nearest whole."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in told:
        for layer, entry in _mapping(record.get("ranks")).items():
            rank, of = _mapping(entry).get("rank"), _mapping(entry).get("of")
            if is_number(rank) and is_number(of):
                found.setdefault(layer, []).append((rank, of))
    return ", ".join(f"{fmean(r for r, _ in pairs):.0f}/{max(of for _, of in pairs):.0f}" for pairs in found.values())


def _importances(told: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """For each seed λ's mean over layers, and the lowest of the layers' first deciles."""
    means, lowest = [], []
    for record in told:
        layers = [_mapping(entry) for entry in _mapping(record.get("importances")).values()]
        of_layers = [mean for layer in layers if is_number(mean := layer.get("mean"))]
        deciles = [found for layer in layers if isinstance(found := layer.get("deciles"), list) and len(found) == 11]
        firsts = [of_layer[1] for of_layer in deciles if is_number(of_layer[1])]
        means += [fmean(of_layers)] if of_layers else []
        lowest += [min(firsts)] if firsts else []
    return means, lowest


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _share(values: Sequence[float]) -> str:
    """A share of 1 to three digits, or to five where three would hide that it is not quite 1."""
    if not values:
        return ""
    mean = fmean(values)
    return f"{mean:.5f}" if 0.9995 <= mean < 1 else f"{mean:.3f}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _text(figure: Figure | None) -> str:
    return "" if figure is None else str(figure)
