"""Figures of finished runs; nothing is trained. They need matplotlib: `pip install matplotlib`."""

from steppe.figures.ablation import ABLATION
from steppe.figures.case_study import CASE_STUDY
from steppe.figures.comparison import COMPARISON
from steppe.figures.figure import Choices, Figure
from steppe.figures.forgetting import FORGETTING
from steppe.figures.importances import IMPORTANCES
from steppe.figures.landscapes import GRID, LANDSCAPES, SURFACE
from steppe.figures.matrix import MATRIX
from steppe.figures.stability import STABILITY
from steppe.figures.sweeps import ASCENT_STEPS, MEMORY_SIZE

FIGURES = {
    figure.name: figure
    for figure in (
        *(FORGETTING, STABILITY, LANDSCAPES, GRID, SURFACE, CASE_STUDY, COMPARISON),
        *(ABLATION, ASCENT_STEPS, MEMORY_SIZE, IMPORTANCES, MATRIX),
    )
}
"""All figures by name, in the order of `steppe figures --list`."""

__all__ = ["FIGURES", "Choices", "Figure"]
