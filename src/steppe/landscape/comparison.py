"""Is the flatter landscape the better learner? Accuracy and flatness of many runs in one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steppe.landscape.files import LANDSCAPE, Landscape, read_landscape


def compared(results: Mapping[Path, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every run that has a landscape: ACC, BWT, and its flatness after its last task and just after each task
    was learnt, as means over tasks. The best learner comes first.
    """
    rows = [
        {
            "method": result["method"],
            "seed": result["seed"],
            "acc": result["acc"],
            "bwt": result["bwt"],
            **_means(read_landscape(path / LANDSCAPE)),
        }
        for path, result in results.items()
        if (path / LANDSCAPE).exists()
    ]
    return sorted(rows, key=lambda row: -row["acc"])


def _means(landscape: Landscape) -> dict[str, float]:
    last = landscape.afters[-1]
    when = {
        "at_the_end": [landscape.pairs[last, task].flatness for task in landscape.tasks(last)],
        "when_learnt": [landscape.pairs[task, task].flatness for task in landscape.afters],
    }
    found = {}
    for time, flat in when.items():
        found[f"sharpness_{time}"] = math.fsum(each.sharpness.mean for each in flat) / len(flat)
        found[f"curvature_{time}"] = math.fsum(each.curvature.mean for each in flat) / len(flat)
        found[f"loss_{time}"] = math.fsum(each.loss for each in flat) / len(flat)
    return found
