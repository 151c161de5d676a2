"""The landscape of a run as a report shows it; a report does without one that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steppe.errors import SteppeError
from steppe.landscape import files
from steppe.landscape.files import read_landscape_of
from steppe.landscape.flatness import Estimate
from steppe.landscape.settings import LandscapeSettings

MEASURES = ("sharpness", "mean_rise", "curvature", "hessian")

Moment = tuple[int, int]  # after how many tasks, on which task; both count from 1
Measures = dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Landscape:
    """Losses along random directions around the weights, and how flat it is there.

    `profiles[after, task]` has a row for each direction and a column for each alpha; `flatness[after, task]` has mean
    and standard deviation of each measure over the directions.
    """

    settings: LandscapeSettings
    profiles: dict[Moment, list[list[float]]]
    flatness: dict[Moment, Measures]


def read_landscape(path: Path, result: Mapping[str, Any]) -> tuple[Landscape | None, list[str]]:
    """The landscape of a finished run, or None with a remark that says why; without the file there is no remark."""
    try:
        found = read_landscape_of(path, result)
    except SteppeError as error:
        return None, [f"its landscape is left out: {error}"]
    if found is None:
        return None, []
    if not found.pairs:
        return None, [f"its {files.LANDSCAPE} holds no profile and is left out."]
    return Landscape(
        found.settings,
        {moment: pair.losses for moment, pair in found.pairs.items()},
        {moment: _measures(pair) for moment, pair in found.pairs.items()},
    ), []


def _measures(pair: files.Pair) -> Measures:
    """Mean and standard deviation; the top eigenvalue is a number alone."""
    told = {name: _spread(getattr(pair.flatness, name)) for name in MEASURES if name != "hessian"}
    return told if pair.eigenvalue is None else {**told, "hessian": (pair.eigenvalue, None)}


def _spread(estimate: Estimate) -> tuple[float, float | None]:
    return estimate.mean, estimate.std
