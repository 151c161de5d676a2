"""Published figures to compare with; the numbers are data, in published.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from steppe.results.statistics import MeanStd


@dataclass(frozen=True)
class PublishedScore(MeanStd):
    """A published mean, with its standard deviation if one was given."""

    mark: str = ""
    """Footnote mark of a figure that is not the paper's own; `footnotes` explains it."""

    def __str__(self) -> str:
        return super().__str__() + self.mark


_MARKS = {
    "copied": ("†", "† The paper took this figure from another, whose network or training differs."),
    "unprinted": ("‡", "‡ In the source of the paper, but not in print."),
}


@functools.cache
def _all() -> dict[str, Any]:
    return tomllib.loads(files("steppe.results").joinpath("published.toml").read_text(encoding="utf-8"))


def methods_with_figures(benchmark: str) -> list[str]:
    """The methods with published figures on a benchmark, in the paper or its released code."""
    return list(_all().get(benchmark, {}))


def published_scores(benchmark: str, method: str, source: str = "paper") -> dict[str, PublishedScore]:
    """Published `acc` and `bwt`.

    Args:
        benchmark: Name of the benchmark.
        method: Name of the method.
        source: `paper`, or `released` for its released code.

    Returns:
        The scores by measure; empty if none were published.

    Example:
        >>> str(published_scores("pmnist", "fs-dgpm")["acc"])
        '76.96 ± 0.51'
    """
    entry = _all().get(benchmark, {}).get(method, {}).get(source, {})
    mark = next((mark for key, (mark, _) in _MARKS.items() if entry.get(key)), "")
    scores = {measure: entry[measure] for measure in ("acc", "bwt") if measure in entry}
    return {measure: PublishedScore(mean, std[0] if std else None, mark) for measure, (mean, *std) in scores.items()}


def footnotes(text: str) -> list[str]:
    """What the footnote marks in a text mean."""
    return [note for mark, note in _MARKS.values() if mark in text]
