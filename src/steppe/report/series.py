"""The numbers that the page's script draws, already averaged over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from steppe.landscape.settings import FLATNESS
from steppe.report.sections import Section, Variant
from steppe.results.schema import Matrix, RunResult, StageCost, TimeMeasure, is_number
from steppe.results.statistics import MeanStd, mean_std

if TYPE_CHECKING:
    from steppe.landscape.files import Landscape, Pair

Data = dict[str, Any]
_FLATNESS_MEASURES = ("sharpness", "mean_rise", "curvature", "hessian")


def section_series(section: Section) -> Data:
    """Everything the script draws of one section, as plain data."""
    return {
        "title": section.title,
        "tasks": section.tasks,
        "measured": "Validation"
        if any(run.result.on_validation for each in section.variants for run in each.runs)
        else "Test",
        "methods": [variant_series(variant, section.timed_by) for variant in section.variants],
        "landscape": landscapes(section),
        "timed_by": section.timed_by,
    }


def variant_series(variant: Variant, timed_by: TimeMeasure) -> Data:
    """Everything the script draws of one method, as plain data."""
    matrices = [run.result.accuracy for run in variant.runs]
    return {
        "name": variant.label,
        "seeds": variant.seeds,
        "acc": round_number(fmean(variant.by_seed("acc").values())),
        "seen": over_seeds([mean_over_seen(matrix) for matrix in matrices]),
        "matrix": [over_seeds(rows) for rows in zip(*matrices, strict=False)],
        "seconds": costs(variant, timed_by),
        "bytes": costs(variant, "bytes"),
        "layers": layers(variant),
    }


def mean_over_seen(matrix: Matrix) -> list[float | None]:
    """After each task the mean accuracy over all tasks so far; None where some of them were not tested."""
    means: list[float | None] = []
    for place, row in enumerate(matrix):
        seen = [value for value in row[: place + 1] if value is not None]
        means.append(sum(seen) / len(seen) if len(seen) == place + 1 else None)
    return means


def over_seeds(curves: Sequence[Sequence[float | None]]) -> Data:
    """Pointwise mean and standard deviation of curves, up to the end of the shortest."""
    points = [mean_std(values) for values in zip(*curves, strict=False)]
    return {
        "mean": [round_number(point.mean if point else None) for point in points],
        "std": [round_number(point.std if point else None) for point in points],
    }


def costs(variant: Variant, measure: TimeMeasure | Literal["bytes"]) -> Data:
    """Time or memory by kind.

    Args:
        variant: The runs to average.
        measure: A measure of time, or `bytes`.

    Returns:
        `kinds`; `all`, memory at the end or time per task; `stages`, the same after each task (after all of them if
        they were learned together), empty if not all runs recorded it.
    """
    results = [run.result for run in variant.runs]
    totals = [_by_kind(result, measure) for result in results]
    kinds = list(dict.fromkeys(kind for total in totals for kind in total))
    shares = [1 if measure == "bytes" else result.num_tasks for result in results]

    def mean(values: Iterable[float | None]) -> float | None:
        found = mean_std(values)
        return round_number(found.mean if found else None)

    tested = [place for place, row in enumerate(results[0].accuracy) if any(value is not None for value in row)]
    stages = []
    if all(len(result.per_task) == len(tested) for result in results):
        for number, place in enumerate(tested):
            costs_here = [_by_kind(result.per_task[number], measure) for result in results]
            values = [mean(cost.get(kind, 0) for cost in costs_here) for kind in kinds]
            stages.append({"task": place, "values": values})
    working = results[0].working if measure == "bytes" else ()
    named = [f"{kind} (working)" if kind in working else kind for kind in kinds]
    whole = [mean(total.get(kind, 0) / share for total, share in zip(totals, shares, strict=True)) for kind in kinds]
    return {"kinds": named, "all": whole, "stages": stages}


def _by_kind(cost: RunResult | StageCost, measure: TimeMeasure | Literal["bytes"]) -> Mapping[str, float]:
    return getattr(cost, measure) or {}


def layers(variant: Variant) -> list[Data]:
    """For each projected layer, after each task, the deciles of the importances and the rank of the basis."""
    size = variant.runs[0].result.num_tasks
    names = dict.fromkeys(
        layer
        for run in variant.runs
        for record in run.log.diagnostics.values()
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


def _deciles(entry: Data) -> list[float] | None:
    deciles = entry.get("deciles")
    whole = isinstance(deciles, list) and len(deciles) == 11 and all(map(is_number, deciles))
    return deciles if whole else None


def _rank(entry: Data) -> list[float] | None:
    rank, of = entry.get("rank"), entry.get("of")
    return [rank, of] if is_number(rank) and is_number(of) else None


def _recorded(
    variant: Variant, size: int, kind: str, layer: str, read: Callable[[Data], list[float] | None]
) -> list[Any]:
    """What was recorded of a layer after each task, as means over seeds; None where nothing was recorded."""
    after_tasks: list[Any] = []
    for place in range(size):
        records = [_part(_part(run.log.diagnostics.get(place, {}), kind), layer) for run in variant.runs]
        known = [values for record in records if (values := read(record)) is not None]
        after_tasks.append([round_number(fmean(values)) for values in zip(*known, strict=True)] or None)
    return after_tasks


def landscapes(section: Section) -> Data | None:
    """Losses around the weights and measures of flatness, by method and moment.

    Only landscapes with the same settings as the first run's are averaged and compared; the others are named.

    Args:
        section: The methods.

    Returns:
        The data for the page; None if no run has a landscape.
    """
    runs = [run for variant in section.variants for run in variant.runs]
    first = next((found.settings for run in runs if (found := run.usable_landscape)), None)
    if first is None:
        return None

    def differences(landscape: Landscape) -> Data:
        return first.differences(landscape.settings, FLATNESS)

    methods = []
    for place, variant in enumerate(section.variants):
        usable = [landscape for run in variant.runs if (landscape := run.usable_landscape)]
        if comparable := [landscape for landscape in usable if not differences(landscape)]:
            moments = sorted({moment for landscape in comparable for moment in landscape.pairs})
            methods.append({"method": place, "moments": [_moment(comparable, *moment) for moment in moments]})
    others = [
        f"{run.name} ({', '.join(f'{key}={value}' for key, value in settings.items())})"
        for run in runs
        if run.usable_landscape and (settings := differences(run.usable_landscape))
    ]
    return {"alphas": [round_number(alpha) for alpha in first.alphas], "methods": methods, "left_out": others}


def _moment(landscapes: Sequence[Landscape], after: int, task: int) -> Data:
    """One moment: losses over all directions of all seeds; flatness over seeds, or over directions for one seed."""
    pairs = [pair for landscape in landscapes if (pair := landscape.pairs.get((after, task)))]
    flatness = {}
    for measure in _FLATNESS_MEASURES:
        values = [value for pair in pairs if (value := _flatness(pair, measure))]
        if found := mean_std(value.mean for value in values):
            std = values[0].std if len(values) == 1 else found.std
            flatness[measure] = {"mean": round_number(found.mean), "std": round_number(std)}
    return {
        "after": after,
        "task": task,
        **over_seeds([row for pair in pairs for row in pair.losses]),
        "flatness": flatness,
    }


def _flatness(pair: Pair, measure: str) -> MeanStd | None:
    """A measure over directions; the top eigenvalue is a single number, which may be missing."""
    if measure == "hessian":
        return None if pair.eigenvalue is None else MeanStd(pair.eigenvalue)
    estimate = getattr(pair.flatness, measure)
    return MeanStd(estimate.mean, estimate.std)


def round_number(value: float | None) -> float | None:
    """Round to five significant digits, which keeps the page small; None if the number is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")
