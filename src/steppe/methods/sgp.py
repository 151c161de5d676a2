"""SGP, scaled gradient projection (Saha and Roy, AAAI 2023): GPM that constrains weak directions less.

SGP is GPM with importances λ. After each task, with σ_i = ‖Rᵀm_i‖ on its inputs R for old and new directions m_i alike,

    λ_i = (α + 1) σ_i / (α σ_i + σ_max)        for a new direction
    λ_i ← min(1, λ_i + (α + 1) σ_i / (α σ_i + σ_max))        for an old one
"""

from __future__ import annotations

from dataclasses import dataclass

from steppe.methods.gpm import GPM, PRESETS
from steppe.projection.importance import ImportanceRule, Spectral
from steppe.registry import register_method
from steppe.settings import log_range, setting


@dataclass(frozen=True)
class SGP(GPM):
    """Settings of SGP: GPM's, and α."""

    alpha: float = setting(
        10.0,
        "how slowly λ falls with the singular value (α); larger keeps more directions near λ = 1",
        at_least=0,
        search=log_range(0.3, 30),
    )

    def importance_rule(self) -> ImportanceRule:
        """The importances λ that a task adds."""
        return Spectral(self.alpha)


_ALPHAS = {
    "pmnist": 1.0,  # ours: the released code does not have this benchmark
    "pmnist-60k": 1.0,
    "cifar100-split": 10.0,
    "cifar100-superclass": 3.0,
    "tiny-imagenet": 10.0,  # also ours
}
register_method(
    "sgp",
    SGP,
    "GPM that constrains directions by their importance.",
    presets={benchmark: {**PRESETS[benchmark], "alpha": alpha} for benchmark, alpha in _ALPHAS.items()},
)
