"""Do flatter landscapes go with better accuracy? Accuracy and flatness of many runs in one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steppe.landscape.files import Landscape, read_landscape_of
from steppe.results.schema import RunResult

_WHEN = ("at_the_end", "when_learnt")  # in keys of flatness.json
_REFERENCE_METHODS = ("finetune", "multitask", "oracle")
_PAIRINGS = 50_000  # more than all pairings of eight runs


def compare_runs(results: Mapping[Path, RunResult]) -> list[dict[str, Any]]:
    """ACC, BWT and flatness of every run with a complete landscape.

    A landscape is complete if it covers every task right after it was learned, and every task at the end. Flatness is
    averaged over tasks at each of these times.

    Args:
        results: Results by run directory.

    Returns:
        A row per run, best ACC first.
    """
    rows = []
    for path, result in results.items():
        landscape = read_landscape_of(path, result)
        if landscape is not None and _is_complete(landscape, result.num_tasks):
            known = {"method": result.method, "seed": result.seed, "acc": result.acc, "bwt": result.bwt}
            rows.append({**known, **_means(landscape)})
    return sorted(rows, key=lambda row: -row["acc"])


def rank_correlations(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Spearman's rank correlation of each measure of flatness with ACC and BWT.

    −1 means that flatter is always better. It is undefined for fewer than three runs, or if all values are equal.

    Args:
        rows: The rows of `compare_runs`.

    Returns:
        A row per measure, with two-sided permutation p-values, without correlations that are undefined.
    """
    found = []
    for measure in [name for name in (rows[0] if rows else ()) if name.endswith(_WHEN)]:
        entry: dict[str, Any] = {"measure": measure, "runs": len(rows)}
        for figure in ("acc", "bwt"):
            values = [[row[name] for row in rows] for name in (measure, figure)]
            if len(rows) > 2 and all(len(set(column)) > 1 for column in values):
                entry[f"rank_correlation_with_{figure}"], entry[f"p_with_{figure}"] = _spearman(*values)
        if len(entry) > 2:
            found.append(entry)
    return found


def without_reference_methods(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows without methods that serve as lower and upper bounds, which are far from all others by design."""
    return [row for row in rows if row["method"] not in _REFERENCE_METHODS]


def _spearman(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The rank correlation, and the share of pairings (a sample, if there are many) that reach it."""
    import numpy as np
    from scipy.stats import permutation_test, rankdata  # imported here: takes a second

    ranks = [rankdata(values) - (len(values) + 1) / 2 for values in (first, second)]
    length = float(np.linalg.norm(ranks[0]) * np.linalg.norm(ranks[1]))

    def correlation(paired: Any, axis: int = -1) -> Any:
        return (paired * ranks[1]).sum(axis=axis) / length

    tested = permutation_test(
        (ranks[0],), correlation, permutation_type="pairings", vectorized=True, n_resamples=_PAIRINGS, rng=0
    )
    return float(tested.statistic), float(tested.pvalue)


def _is_complete(landscape: Landscape, tasks: int) -> bool:
    """Whether every task was measured right after it was learned, and all tasks at the end."""
    places = range(1, tasks + 1)
    return all((task, task) in landscape.pairs and (tasks, task) in landscape.pairs for task in places)


def _means(landscape: Landscape) -> dict[str, float]:
    last = landscape.afters[-1]
    at_the_end = [landscape.pairs[last, task].flatness for task in landscape.tasks(last)]
    when_learnt = [landscape.pairs[task, task].flatness for task in landscape.afters]
    found = {}
    for time, flat in zip(_WHEN, (at_the_end, when_learnt), strict=True):
        found[f"sharpness_{time}"] = math.fsum(each.sharpness.mean for each in flat) / len(flat)
        found[f"curvature_{time}"] = math.fsum(each.curvature.mean for each in flat) / len(flat)
        found[f"loss_{time}"] = math.fsum(each.loss for each in flat) / len(flat)
    return found
