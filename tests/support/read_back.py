"""What a figure shows, read from its axes."""

from __future__ import annotations

from typing import Any


def band(axes: Any, number: int) -> list[tuple[float, float]]:
    """The lower and upper ends of a band, by x."""
    vertices = axes.collections[number].get_paths()[0].vertices
    found: dict[float, list[float]] = {}
    for x, y in vertices:
        found.setdefault(float(x), []).append(float(y))
    return [(min(ends), max(ends)) for _, ends in sorted(found.items())]
