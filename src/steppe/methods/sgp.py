"""SGP, scaled gradient projection (Saha and Roy, AAAI 2023): GPM that holds weak directions less tightly.

Everything is GPM's but the importances λ. With σ_i = ‖Rᵀm_i‖ on the task just learnt, for new directions and old ones
alike, each task gives λ_i = (α + 1) σ_i / (α σ_i + σ_max); an old direction adds that to what it had, up to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from steppe.methods.gpm import GPM, PRESETS
from steppe.projection.importance import ImportanceRule, Spectral
from steppe.registry import register_method
from steppe.settings import setting


@dataclass(frozen=True)
class SGP(GPM):
    """Settings of SGP: those of GPM, and α."""

    alpha: float = setting(10.0, "how fast λ falls with the singular value (α); larger: later", at_least=0)

    def importance_rule(self) -> ImportanceRule:
        """What λ a task's directions get, before it is added to what they had."""
        return Spectral(self.alpha)


_ALPHAS = {
    "pmnist": 1.0,  # our choice: the released code has no such benchmark
    "pmnist-60k": 1.0,
    "cifar100-split": 10.0,
    "cifar100-superclass": 3.0,
    "tiny-imagenet": 10.0,  # likewise
}
register_method(
    "sgp",
    SGP,
    "GPM whose directions are held by how much they mattered.",
    presets={benchmark: {**PRESETS[benchmark], "alpha": alpha} for benchmark, alpha in _ALPHAS.items()},
)
