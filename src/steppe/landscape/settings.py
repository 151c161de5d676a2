"""Settings of a landscape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steppe.errors import UsageError
from steppe.settings import Settings, Value, setting

PROFILES = ("samples", "points", "range", "seed")
"""Settings that profiles must share to be averaged or drawn together. More directions only reduce their error, and the
settings of the bound do not affect them.
"""
FLATNESS = (*PROFILES, "radius")
"""The same for measures of flatness."""
_LEAST, _MOST = 1e-30, 1e30  # whose squares, and weights moved this far, are still finite


@dataclass(frozen=True)
class LandscapeSettings(Settings):
    """Everything a landscape's numbers depend on besides the run.

    Example:
        >>> LandscapeSettings(points=5, radius=0.5).alphas
        [-1.0, -0.5, 0.0, 0.5, 1.0]
    """

    samples: int = setting(1000, "training samples of each task to compute losses on", at_least=1)
    directions: int = setting(10, "random directions, and draws of noise for the bound", at_least=1)
    points: int = setting(51, "values of alpha; odd, so that 0 is one of them", at_least=3)
    range: float = setting(1.0, "alpha runs from -range to range", at_least=_LEAST, at_most=_MOST)
    radius: float = setting(0.4, "largest |alpha| for sharpness and mean rise", above=0)
    sigma: float = setting(
        0.01, "standard deviation of the bound's noise in every weight", at_least=_LEAST, at_most=_MOST
    )
    delta: float = setting(0.05, "the bound holds with probability 1 - delta", above=0, below=1)
    seed: int = setting(0, "seed of directions, noise and the choice of samples", at_least=0, at_most=2**63 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points % 2 == 0:
            raise UsageError(
                f"points = {self.points} is even; pass an odd number, so that alpha = 0 is one of the points."
            )
        if not self.step <= self.radius <= self.range:
            raise UsageError(
                f"radius = {self.radius:g} is out of range: it must be at least one step of alpha, {self.step:g}, and "
                f"at most range = {self.range:g}."
            )

    def differences(self, other: LandscapeSettings, names: Iterable[str] | None = None) -> dict[str, Value]:
        """The settings in which another landscape differs.

        Args:
            other: The other landscape's settings.
            names: The settings to compare; by default all.

        Returns:
            The other landscape's values, by name.
        """
        own, others = self.as_dict(), other.as_dict()
        return {name: others[name] for name in names or own if others[name] != own[name]}

    def options(self) -> list[str]:
        """The command-line options for these settings, without defaults."""
        usual = type(self)().as_dict()
        changed = {name: value for name, value in self.as_dict().items() if value != usual[name]}
        return [word for name, value in changed.items() for word in (f"--{name}", str(value))]

    @property
    def step(self) -> float:
        """The distance between neighboring values of alpha."""
        return self.range / (self.points // 2)

    @property
    def alphas(self) -> list[float]:
        """From −range to range, exactly symmetric, with 0 in the middle."""
        half = self.points // 2
        return [self.range * (place / half) for place in range(-half, half + 1)]
