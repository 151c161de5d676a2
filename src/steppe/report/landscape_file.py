"""landscape.json of a run directory, read tolerantly: a report does without what it cannot read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANDSCAPE = "landscape.json"
FORMAT = 1
MEASURES = ("sharpness", "mean_rise", "curvature", "hessian")

Moment = tuple[int, int]  # after how many tasks, on which task; both count from 1


@dataclass(frozen=True)
class Landscape:
    """Losses along random directions around the weights, and how flat it is there.

    `profiles[after, task]` has a row for each direction and a column for each alpha; `flatness[after, task]` has mean
    and standard deviation of each measure over the directions.
    """

    alphas: tuple[float, ...]
    profiles: dict[Moment, list[list[float]]]
    flatness: dict[Moment, dict[str, tuple[float, float | None]]]


def read_landscape(path: Path) -> tuple[Landscape | None, list[str]]:
    """The landscape of a run directory, or None with a remark that says why; without the file there is no remark."""
    file = path / LANDSCAPE
    if not file.exists():
        return None, []
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            return None, [f"its {LANDSCAPE} has format {data['format']!r}, not {FORMAT}, and is left out."]
        return _parsed(data), []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return None, [f"its {LANDSCAPE} cannot be read and is left out ({type(error).__name__}: {error})."]


def _parsed(data: dict[str, Any]) -> Landscape:
    alphas = tuple(_finite(alpha) for alpha in data.get("alphas") or data["settings"]["alphas"])
    profiles = {}
    for moment, profile in _by_moment(data["profiles"]):
        rows = profile["losses"] if isinstance(profile, dict) else profile
        losses = [[_finite(loss) for loss in row] for row in rows]
        if not losses or any(len(row) != len(alphas) for row in losses):
            raise ValueError(f"a profile does not have {len(alphas)} losses for each direction")
        profiles[moment] = losses
    if not alphas or not profiles:
        raise ValueError("it has no profile")
    flatness: dict[Moment, dict[str, tuple[float, float | None]]] = {}
    for moment, entry in _by_moment(data.get("flatness") or {}):
        told = {measure: _measured(entry[measure]) for measure in MEASURES if entry.get(measure) is not None}
        flatness.setdefault(moment, {}).update(told)
    for moment, value in _by_moment(data.get("hessian") or {}):
        flatness.setdefault(moment, {})["hessian"] = _measured(value)
    return Landscape(alphas, profiles, flatness)


def _by_moment(part: Any) -> Iterator[tuple[Moment, Any]]:
    """A part of the file by moment: entries that say theirs, or `{after: {task: entry}}`."""
    if isinstance(part, list):
        yield from (((int(entry["after"]), int(entry["task"])), entry) for entry in part)
    else:
        for after, column in part.items():
            yield from (((int(after), int(task)), entry) for task, entry in column.items())


def _measured(value: Any) -> tuple[float, float | None]:
    """Mean and standard deviation; the curvature by the Hessian is a number alone."""
    if isinstance(value, dict):
        return _finite(value["mean"]), None if value.get("std") is None else _finite(value["std"])
    return _finite(value), None


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)
