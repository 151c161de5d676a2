"""Draw the figures of docs/concepts.md: what projection takes from a gradient, and why flat places forget less.

They are drawn from the formulas, not from runs. `--out DIR` puts them elsewhere than docs/images.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
from matplotlib import pyplot

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"  # Okabe and Ito
_STEADY = {"svg.hashsalt": "steppe", "svg.fonttype": "path", "font.size": 10}  # the same file every time


def projection(out: Path) -> None:
    """Left a gradient, the plane of old inputs, its parts within and outside; right what soft projection leaves."""
    figure = pyplot.figure(figsize=(9, 3.8), layout="constrained")
    space = figure.add_subplot(1, 2, 1, projection="3d")
    memory = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # M: old inputs span the floor
    gradient = np.array([0.75, 0.55, 0.8])
    within = memory @ (memory.T @ gradient)
    side = np.array([-0.3, 1.1])
    across, along = np.meshgrid(side, side)
    space.plot_surface(across, along, np.zeros_like(across), color=GREY, alpha=0.25, linewidth=0)
    space.text(0.2, -0.1, -0.08, "span of old inputs, M", color="#444444", fontsize=9)
    _arrow(space, gradient, BLUE)
    _arrow(space, within, RED)
    _arrow(space, gradient - within, GREEN)
    for end in (within, gradient - within):
        space.plot(*zip(end, gradient, strict=True), color=GREY, linestyle=":", linewidth=1)
    space.text(*(gradient + [0.0, 0.05, 0.03]), "gradient G", color=BLUE)
    space.text(*(within + [0.1, 0.05, -0.05]), "within: G M Mᵀ", color=RED)
    space.text(-0.1, -0.2, 0.87, "outside: G − G M Mᵀ", color=GREEN)
    space.set(xlim=(-0.3, 1.1), ylim=(-0.3, 1.1), zlim=(0, 1.0))
    space.set_title("a step along the green arrow leaves old outputs as they are", fontsize=10)
    space.view_init(elev=20, azim=-58)
    space.set_axis_off()
    space.set_box_aspect((1, 1, 0.75), zoom=1.25)
    _soft(figure.add_subplot(1, 2, 2))
    _save(figure, out / "projection.svg")


def _arrow(axes: Any, tip: np.ndarray, colour: str) -> None:
    axes.quiver(0, 0, 0, *tip, color=colour, linewidth=2, arrow_length_ratio=0.1)


def _soft(axes: Any) -> None:
    """The same gradient along one direction u of the memory, for three importances."""
    along, beyond = 1.0, 0.8
    for importance, colour in ((0.0, BLUE), (0.5, "#CC79A7"), (1.0, GREEN)):
        tip = ((1 - importance) * along, beyond)
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "mutation_scale": 14, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tip, (0, 0), arrowprops=arrow)
        axes.text(tip[0] + 0.03, beyond + 0.03, f"λ = {importance:g}", color=colour)
    axes.annotate("", (1.25, 0), (-0.15, 0), arrowprops={"arrowstyle": "-|>", "color": GREY})
    axes.text(1.23, -0.09, "a direction u of the memory", color="#444444", ha="right", fontsize=9)
    axes.annotate("", (0, 1.05), (0, -0.1), arrowprops={"arrowstyle": "-|>", "color": GREY})
    axes.text(-0.05, 0.2, "outside the memory", color="#444444", rotation=90, ha="right", fontsize=9)
    axes.set(xlim=(-0.25, 1.3), ylim=(-0.2, 1.1))
    axes.set_title("what is left of a gradient, by the importance of u", fontsize=10)
    axes.set_axis_off()


def sharpness(out: Path) -> None:
    """Left a sharp and a flat minimum and what a later task's move costs in each; right one update with its ascent."""
    figure, (minima, update) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    weights = np.linspace(-0.5, 3.7, 600)
    minima.plot(weights, _loss(weights), color="black", linewidth=1.5)
    moved = 0.35
    for place, colour, name in ((0.45, RED, "sharp"), (2.5, GREEN, "flat")):
        before, after = float(_loss(np.array(place))), float(_loss(np.array(place + moved)))
        minima.plot([place], [before], "o", color=colour)
        minima.plot([place + moved], [after], "o", color=colour, markerfacecolor="white")
        minima.plot([place, place + moved], [before, before], color=colour, linewidth=1)
        minima.plot([place + moved, place + moved], [before, after], color=colour, linewidth=2)
        minima.text(place, before - 0.13, name, color=colour, ha="center")
    minima.set(
        xlim=(-0.5, 3.7), ylim=(-0.08, 1.5), xlabel="weights", ylabel="loss of an old task", xticks=[], yticks=[]
    )
    minima.spines[["top", "right"]].set_visible(False)
    minima.set_title("the same move by a later task costs more where it is sharp", fontsize=10)
    _ascent(update)
    _save(figure, out / "sharpness.svg")


def _loss(w: np.ndarray) -> np.ndarray:
    """Two valleys of one depth, one narrow and one wide."""
    return np.asarray(1.2 - 1.05 * np.exp(-((w - 0.45) ** 2) / 0.06) - 1.05 * np.exp(-((w - 2.5) ** 2) / 0.9))


def _ascent(axes: Any) -> None:
    """w, two ascents within the memory (across), and the step outside it (upwards) with the gradient found there."""
    curvature, tilt = np.array([[1.6, -0.7], [-0.7, 1.0]]), np.array([0.0, -0.4])
    across, along = np.meshgrid(np.linspace(-1.7, 1.9, 200), np.linspace(-1.5, 1.4, 200))
    points = np.stack([across, along], -1)
    loss = 0.5 * np.einsum("...i,ij,...j", points, curvature, points) + points @ tilt
    axes.contour(across, along, loss, levels=12, colors=GREY, linewidths=0.6, alpha=0.7)
    w, v = np.array([0.3, -0.8]), np.zeros(2)
    path = [w]
    for _ in range(2):
        slope = curvature @ (w + v) + tilt
        v = v + 0.35 * np.array([slope[0], 0.0])  # within: the first direction is the memory's
        path.append(w + v)
    found = curvature @ (w + v) + tilt
    step = w - 0.5 * np.array([0.0, found[1]])  # outside: the second direction is free
    for start, end in itertools.pairwise(path):
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": RED, "linewidth": 2})
    axes.annotate("", step, w, arrowprops={"arrowstyle": "-|>", "color": GREEN, "linewidth": 2})
    axes.plot(*w, "o", color="black")
    axes.plot(*path[-1], "o", color=RED, markerfacecolor="white")
    axes.text(w[0] - 0.1, w[1] - 0.2, "w")
    axes.text(path[-1][0], path[-1][1] - 0.22, "w + v", color=RED, ha="center")
    axes.text(step[0] + 0.08, step[1], "new w", color=GREEN)
    axes.set(xlabel="within the memory", ylabel="outside it", xticks=[], yticks=[])
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("climb within the memory, then step outside it", fontsize=10)


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR", help="where to put them")
    out = parser.parse_args().out
    with matplotlib.rc_context(_STEADY):
        projection(out)
        sharpness(out)
    print(f"wrote projection.svg and sharpness.svg to {out}")


if __name__ == "__main__":
    main()
