"""What a landscape is measured with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steppe.errors import UsageError
from steppe.settings import Settings, Value, setting

PROFILES = ("samples", "points", "range", "seed")
"""What profiles must share to be averaged or drawn together: on what, where and along which draws they were taken. More
directions only make them surer, and the bound's settings do not reach them.
"""
FLATNESS = (*PROFILES, "radius")
"""The same for figures of flatness."""
_LEAST, _MOST = 1e-30, 1e30  # their squares are numbers still, and so are weights moved so far


@dataclass(frozen=True)
class LandscapeSettings(Settings):
    """Everything that the numbers of a landscape depend on, besides the run."""

    samples: int = setting(1000, "training samples of each task that losses are taken on", at_least=1)
    directions: int = setting(10, "random directions, and draws of the bound's noise", at_least=1)
    points: int = setting(51, "values of alpha, odd, so that 0 is one of them", at_least=3)
    range: float = setting(1.0, "alpha goes from minus this to this", at_least=_LEAST, at_most=_MOST)
    radius: float = setting(0.4, "how far from 0 sharpness and mean rise look", above=0)
    sigma: float = setting(
        0.01, "standard deviation of the bound's noise in every weight", at_least=_LEAST, at_most=_MOST
    )
    delta: float = setting(0.05, "the bound holds with probability 1 - delta", above=0, below=1)
    seed: int = setting(0, "of directions, noise and the choice of samples", at_least=0, at_most=2**63 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points % 2 == 0:
            raise UsageError(f"points = {self.points} is even: give an odd number, so that alpha = 0 is one of them.")
        if not self.step <= self.radius <= self.range:
            raise UsageError(
                f"radius = {self.radius:g} is out of range: it must be at least one step of alpha, {self.step:g}, and "
                f"at most range = {self.range:g}."
            )

    def differences(self, other: LandscapeSettings, names: Iterable[str]) -> dict[str, Value]:
        """Which of these settings the other has otherwise, with its values."""
        theirs = other.as_dict()
        return {name: theirs[name] for name in names if theirs[name] != self.as_dict()[name]}

    def options(self) -> list[str]:
        """The words of a command line that ask for these settings: those that differ from the defaults."""
        usual = type(self)().as_dict()
        changed = {name: value for name, value in self.as_dict().items() if value != usual[name]}
        return [word for name, value in changed.items() for word in (f"--{name}", str(value))]

    @property
    def step(self) -> float:
        """Between one alpha and the next."""
        return self.range / (self.points // 2)

    @property
    def alphas(self) -> list[float]:
        """From −range to range, exactly symmetric, with 0 in the middle."""
        half = self.points // 2
        return [self.range * (place / half) for place in range(-half, half + 1)]
