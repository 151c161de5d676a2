"""The numbers that the page's script draws: everything is averaged over seeds here, nothing there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from steppe.landscape.settings import FLATNESS
from steppe.report.landscape_file import MEASURES, Landscape
from steppe.report.sections import Section, Variant
from steppe.results.schema import is_number
from steppe.results.statistics import spread
from steppe.results.tables import SECONDS

Matrix = list[list[float | None]]
Data = dict[str, Any]


def section_series(section: Section) -> Data:
    """Everything to draw of one section."""
    return {
        "title": section.title,
        "tasks": section.tasks,
        "methods": [variant_series(variant, section.timed_by) for variant in section.variants],
        "landscape": landscapes(section),
        "timed_by": section.timed_by,
    }


def variant_series(variant: Variant, timed_by: str) -> Data:
    """Everything to draw of one method."""
    matrices = [run.result["accuracy"] for run in variant.runs]
    return {
        "name": variant.label,
        "seeds": variant.seeds,
        "acc": rounded(fmean(variant.by_seed("acc").values())),
        "seen": over_seeds([mean_over_seen(matrix) for matrix in matrices]),
        "matrix": [over_seeds(rows) for rows in zip(*matrices, strict=False)],
        "seconds": costs(variant, timed_by),
        "bytes": costs(variant, "bytes"),
        "layers": layers(variant),
    }


def mean_over_seen(matrix: Matrix) -> list[float | None]:
    """After each task the mean accuracy over the tasks seen so far; None where nothing was tested."""
    means: list[float | None] = []
    for place, row in enumerate(matrix):
        seen = [value for value in row[: place + 1] if value is not None]
        means.append(sum(seen) / len(seen) if len(seen) == place + 1 else None)
    return means


def over_seeds(curves: Sequence[Sequence[float | None]]) -> Data:
    """Mean and standard deviation of curves, point by point, as far as the shortest goes."""
    points = [spread(values) for values in zip(*curves, strict=False)]
    return {
        "mean": [rounded(point.mean if point else None) for point in points],
        "std": [rounded(point.std if point else None) for point in points],
    }


def costs(variant: Variant, measure: str) -> Data:
    """Seconds or bytes by kind: `all` for a whole run (seconds for each of its tasks), `stages` after each task.

    Tasks learnt together have one stage for all of them.
    """
    results = [run.result for run in variant.runs]
    kinds = list(dict.fromkeys(kind for result in results for kind in result[measure]))

    def mean(values: Iterable[float | None]) -> float | None:
        found = spread(values)
        return rounded(found.mean if found else None)

    def whole(kind: str) -> float | None:
        shares = [len(result["accuracy"]) if measure in SECONDS else 1 for result in results]
        return mean(result[measure].get(kind, 0) / share for result, share in zip(results, shares, strict=True))

    tested = [place for place, row in enumerate(results[0]["accuracy"]) if any(value is not None for value in row)]
    told = [result["per_task"] for result in results if isinstance(result.get("per_task"), list)]
    stages = []
    if len(told) == len(results) and all(len(stage) == len(tested) for stage in told):
        for number, place in enumerate(tested):
            at = [_part(stage[number], measure) for stage in told]
            stages.append({"task": place, "values": [mean(values.get(kind, 0) for values in at) for kind in kinds]})
    return {"kinds": kinds, "all": [whole(kind) for kind in kinds], "stages": stages}


def layers(variant: Variant) -> list[Data]:
    """For each covered layer the deciles of the importances as each task left them, and the rank of its basis after."""
    size = len(variant.runs[0].result["accuracy"])
    names = dict.fromkeys(
        layer
        for run in variant.runs
        for record in run.records.values()
        for kind in ("ranks", "importances")
        for layer in _part(record, kind)
    )
    found = []
    for name in names:
        deciles = _recorded(variant, size, "importances", name, _deciles)
        ranks = _recorded(variant, size, "ranks", name, _rank)
        entry: Data = {"name": name}
        if any(deciles):
            entry["deciles"] = deciles
        if any(ranks):
            entry["rank"] = [pair and pair[0] for pair in ranks]
            entry["of"] = max(pair[1] for pair in ranks if pair)
        found.append(entry)
    return [entry for entry in found if len(entry) > 1]


def _part(record: Any, kind: str) -> Data:
    part = record.get(kind) if isinstance(record, dict) else None
    return part if isinstance(part, dict) else {}


def _deciles(told: Data) -> list[float] | None:
    deciles = told.get("deciles")
    whole = isinstance(deciles, list) and len(deciles) == 11 and all(map(is_number, deciles))
    return deciles if whole else None


def _rank(told: Data) -> list[float] | None:
    rank, of = told.get("rank"), told.get("of")
    return [rank, of] if is_number(rank) and is_number(of) else None


def _recorded(
    variant: Variant, size: int, kind: str, layer: str, read: Callable[[Data], list[float] | None]
) -> list[Any]:
    """What was recorded of a layer after each task, number by number the mean over seeds; None where nothing was."""
    after_tasks: list[Any] = []
    for place in range(size):
        records = [_part(_part(run.records.get(place, {}), kind), layer) for run in variant.runs]
        told = [values for record in records if (values := read(record)) is not None]
        after_tasks.append([rounded(fmean(values)) for values in zip(*told, strict=True)] or None)
    return after_tasks


def landscapes(section: Section) -> Data | None:
    """Losses around the weights and measures of flatness, by method and moment; None where no run has any.

    Only what was measured as the first run's can be averaged and compared; the others are named.
    """
    runs = [run for variant in section.variants for run in variant.runs]
    first = next((run.landscape.settings for run in runs if run.landscape), None)
    if first is None:
        return None

    def apart(landscape: Landscape) -> Data:
        return first.apart(landscape.settings, FLATNESS)

    methods = []
    for place, variant in enumerate(section.variants):
        own = [run.landscape for run in variant.runs if run.landscape and not apart(run.landscape)]
        if own:
            moments = sorted({moment for landscape in own for moment in landscape.profiles})
            methods.append({"method": place, "moments": [_moment(own, *moment) for moment in moments]})
    others = [
        f"{run.name} ({', '.join(f'{key}={value}' for key, value in settings.items())})"
        for run in runs
        if run.landscape and (settings := apart(run.landscape))
    ]
    return {"alphas": [rounded(alpha) for alpha in first.alphas], "methods": methods, "left_out": others}


def _moment(landscapes: Sequence[Landscape], after: int, task: int) -> Data:
    """One moment: losses over all directions of all seeds; flatness over seeds, or over directions for one seed."""
    rows = [row for landscape in landscapes for row in landscape.profiles.get((after, task), [])]
    flatness = {}
    for measure in MEASURES:
        told = [entry[measure] for each in landscapes if measure in (entry := each.flatness.get((after, task), {}))]
        found = spread(mean for mean, _ in told)
        if found:
            std = told[0][1] if len(told) == 1 else found.std
            flatness[measure] = {"mean": rounded(found.mean), "std": rounded(std)}
    return {"after": after, "task": task, **over_seeds(rows), "flatness": flatness}


def rounded(value: float | None) -> float | None:
    """A number to five significant digits, for a smaller page; what is not finite becomes None."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")
