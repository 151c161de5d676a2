"""Draw docs/images/architecture.svg from docs/architecture.md: the packages, and the ways through them.

`--out DIR` puts it elsewhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import architecture
import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#8A4F9E")
_GREY = "#555555"
_STEADY = {"svg.hashsalt": "steppe", "svg.fonttype": "path", "font.size": 10}  # the same file every time
_NAME, _TEXT, _LANE, _BETWEEN = 0.25, 1.9, 7.2, 0.95  # where columns begin, in rows' heights of 0.3 inches


def draw(out: Path) -> None:
    """One line per package, a box per row of the table, and a lane per way with its steps where they happen."""
    plan = architecture.read()
    lines = {
        name: text for names, text in zip(plan.rows, plan.texts, strict=True) for name, text in _split(names, text)
    }
    heights: dict[str, float] = {}
    bottom = 0.0
    width = _LANE + _BETWEEN * len(plan.ways)
    figure, axes = pyplot.subplots(figsize=(8, 0.27 * (len(lines) + 0.35 * len(plan.rows) + 1.5)), layout="constrained")
    for names in plan.rows:
        top = bottom
        for name in names:
            bottom += 1
            heights[name] = bottom - 0.5
        box = FancyBboxPatch((0, top), width, bottom - top, boxstyle="round,pad=0,rounding_size=0.12", linewidth=0)
        box.set_facecolor("#eef2f4")
        axes.add_patch(box)
        bottom += 0.35
    for name, text in lines.items():
        axes.text(_NAME, heights[name], name, family="monospace", weight="bold", va="center")
        axes.text(_TEXT, heights[name], text, color=_GREY, va="center", fontsize=9.5)
    for lane, (way, steps) in enumerate(plan.ways.items()):
        _draw_way(axes, _LANE + _BETWEEN * (lane + 0.5), COLOURS[lane], way, _stops(steps, heights))
    axes.set(xlim=(-0.05, width + 0.05), ylim=(bottom, -1.2))
    axes.set_axis_off()
    figure.savefig(out / "architecture.svg", metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


def _split(names: list[str], text: str) -> list[tuple[str, str]]:
    """The text of each package of a row, where they are several between semicolons."""
    texts = text.replace("`", "").split("; ", len(names) - 1)
    return list(zip(names, texts, strict=True))


def _stops(steps: list[list[str]], heights: dict[str, float]) -> dict[float, list[int]]:
    """The numbers of the steps at each height."""
    stops: dict[float, list[int]] = {}
    for number, files in enumerate(steps, start=1):
        for package in dict.fromkeys(file.partition("/")[0] for file in files):
            stops.setdefault(heights[package], []).append(number)
    return stops


def _draw_way(axes: Any, x: float, colour: str, way: str, stops: dict[float, list[int]]) -> None:
    axes.text(x, -0.6, f"a {way}", color=colour, weight="bold", ha="center", va="center")
    axes.plot([x, x], [min(stops), max(stops)], color=colour, linewidth=1.5, alpha=0.5)
    for height, numbers in stops.items():
        words = " ".join(map(str, numbers))
        circle = {"boxstyle": "round,pad=0.25", "facecolor": colour, "linewidth": 0}
        axes.text(x, height, words, color="white", fontsize=8, ha="center", va="center", bbox=circle)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR", help="where to put it")
    out = parser.parse_args().out
    with matplotlib.rc_context(_STEADY):
        draw(out)
    print(f"wrote architecture.svg to {out}")


if __name__ == "__main__":
    main()
