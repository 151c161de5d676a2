"""Every method of a section against one of them: the rows of the table of differences."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from steppe.report.sections import Section
from steppe.results.statistics import MeanDifference, compare_means, holm_correction

_MEASURES = ("acc", "bwt")


@dataclass(frozen=True)
class DifferenceRow:
    """One method against the chosen one: for each measure the difference and Holm's p."""

    label: str
    comparisons: tuple[tuple[MeanDifference, float | None], ...]

    def cells(self) -> list[str]:
        """Difference, p and number of seeds of each measure, as text; p below 0.05 in bold."""
        return [text for compared, p in self.comparisons for text in _cells(compared, p)]


def table_of_differences(section: Section, chosen: int) -> list[DifferenceRow]:
    """All other methods minus the chosen one; each measure's tests are one family."""
    against = section.variants[chosen]
    others = [variant for place, variant in enumerate(section.variants) if place != chosen]
    columns = []
    for measure in _MEASURES:
        compared = [compare_means(other.by_seed(measure), against.by_seed(measure)) for other in others]
        columns.append(list(zip(compared, holm_correction([each.p for each in compared]), strict=True)))
    return [DifferenceRow(other.label, found) for other, found in zip(others, zip(*columns, strict=True), strict=True)]


def default_reference(section: Section) -> int:
    """The method to compare with until the reader chooses another: the best that learns one task after another."""

    def rank(place: int) -> tuple[bool, float]:
        variant = section.variants[place]
        in_order = bool(variant.by_seed("bwt")) and variant.runs[0].result.is_sequential
        return in_order, fmean(variant.by_seed("acc").values())

    return max(range(len(section.variants)), key=rank)


def _cells(compared: MeanDifference, p: float | None) -> tuple[str, str, str]:
    if compared.mean is None:  # a measure that one of the two does not have
        return "", "", ""
    gap = f"{compared.mean:+.2f}".replace("-", "−")
    seeds = " | ".join(map(str, compared.seeds))
    if p is None:
        return gap, compared.reason, seeds
    shown = "&lt; 0.001" if p < 0.001 else f"{p:.3f}"
    return gap, f"<b>{shown}</b>" if p < 0.05 else shown, seeds
