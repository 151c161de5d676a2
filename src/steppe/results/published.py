"""Published figures to stand beside ours; the numbers are data, in published.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A published mean, with its standard deviation where one was given."""

    mean: float
    std: float | None = None
    mark: str = ""
    """What stands behind a figure that is not the paper's own; `notes_on_marks` says why."""

    def __str__(self) -> str:
        return (f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}") + self.mark


_MARKS = {
    "copied": ("†", "† The paper took this figure from another, whose network or training differs."),
    "unprinted": ("‡", "‡ In the source of the paper, but not in print."),
}


@functools.cache
def _all() -> dict[str, Any]:
    return tomllib.loads(files("steppe.results").joinpath("published.toml").read_text(encoding="utf-8"))


def methods_with_figures(benchmark: str) -> list[str]:
    """The methods for which the paper or its released code has figures on a benchmark."""
    return list(_all().get(benchmark, {}))


def published(benchmark: str, method: str, source: str = "paper") -> dict[str, Figure]:
    """ACC and BWT that the paper, or its released code, reports; empty where it reports none."""
    found = _all().get(benchmark, {}).get(method, {}).get(source, {})
    mark = next((mark for key, (mark, _) in _MARKS.items() if found.get(key)), "")
    measures = [measure for measure in ("acc", "bwt") if measure in found]
    return {measure: replace(Figure(*found[measure]), mark=mark) for measure in measures}


def notes_on_marks(text: str) -> list[str]:
    """What the marks that occur in a text mean."""
    return [note for mark, note in _MARKS.values() if mark in text]
