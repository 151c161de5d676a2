"""The landscape of a run as a report shows it; a report does without one that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steppe.errors import SteppeError
from steppe.landscape import files
from steppe.landscape.flatness import Estimate

MEASURES = ("sharpness", "mean_rise", "curvature", "hessian")

Moment = tuple[int, int]  # after how many tasks, on which task; both count from 1
Measures = dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Landscape:
    """Losses along random directions around the weights, and how flat it is there.

    `profiles[after, task]` has a row for each direction and a column for each alpha; `flatness[after, task]` has mean
    and standard deviation of each measure over the directions.
    """

    alphas: tuple[float, ...]
    profiles: dict[Moment, list[list[float]]]
    flatness: dict[Moment, Measures]


def read_landscape(path: Path) -> tuple[Landscape | None, list[str]]:
    """The landscape of a run directory, or None with a remark that says why; without the file there is no remark."""
    if not (path / files.LANDSCAPE).exists():
        return None, []
    try:
        found = files.read_landscape(path)
    except SteppeError as error:
        return None, [f"its landscape is left out: {error}"]
    if not found.pairs:
        return None, [f"its {files.LANDSCAPE} holds no profile and is left out."]
    return Landscape(
        tuple(found.settings.alphas),
        {moment: pair.losses for moment, pair in found.pairs.items()},
        {moment: _measures(pair) for moment, pair in found.pairs.items()},
    ), []


def _measures(pair: files.Pair) -> Measures:
    """Mean and standard deviation; the top eigenvalue is a number alone."""
    told = {name: _spread(getattr(pair.flatness, name)) for name in MEASURES if name != "hessian"}
    return told if pair.eigenvalue is None else {**told, "hessian": (pair.eigenvalue, None)}


def _spread(estimate: Estimate) -> tuple[float, float | None]:
    return estimate.mean, estimate.std
