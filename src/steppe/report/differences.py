"""The table of differences: every method of a section compared with one of them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from steppe.report.sections import Section
from steppe.results.statistics import MeanDifference, compare_means, holm_correction

_MEASURES = ("acc", "bwt")


@dataclass(frozen=True)
class DifferenceRow:
    """One method minus the reference: for each measure the difference and Holm's corrected p."""

    label: str
    comparisons: tuple[tuple[MeanDifference, float | None], ...]

    def cells(self) -> list[str]:
        """Difference, p and number of seeds of each measure, as HTML; p below 0.05 is bold."""
        return [text for compared, p in self.comparisons for text in _cells(compared, p)]


def difference_rows(section: Section, reference: int) -> list[DifferenceRow]:
    """Compare all other methods with a reference. The tests of each measure are one family.

    Args:
        section: The methods.
        reference: Index of the method to compare with.

    Returns:
        A row for each other method.
    """
    against = section.variants[reference]
    others = [variant for place, variant in enumerate(section.variants) if place != reference]
    columns = []
    for measure in _MEASURES:
        compared = [compare_means(other.by_seed(measure), against.by_seed(measure)) for other in others]
        columns.append(list(zip(compared, holm_correction([each.p for each in compared]), strict=True)))
    return [DifferenceRow(other.label, found) for other, found in zip(others, zip(*columns, strict=True), strict=True)]


def default_reference(section: Section) -> int:
    """Index of the method that is compared with at first: the best that learns sequentially."""

    def rank(place: int) -> tuple[bool, float]:
        variant = section.variants[place]
        sequential = bool(variant.by_seed("bwt")) and variant.runs[0].result.is_sequential
        return sequential, fmean(variant.by_seed("acc").values())

    return max(range(len(section.variants)), key=rank)


def _cells(compared: MeanDifference, p: float | None) -> tuple[str, str, str]:
    if compared.mean is None:  # one of the two does not have the measure
        return "", "", ""
    gap = f"{compared.mean:+.2f}".replace("-", "−")
    seeds = " | ".join(map(str, compared.seeds))
    if p is None:
        return gap, compared.reason, seeds
    shown = "&lt; 0.001" if p < 0.001 else f"{p:.3f}"
    return gap, f"<b>{shown}</b>" if p < 0.05 else shown, seeds
