"""One seed, many independent named streams: nothing random in `steppe` comes from anywhere else.

Each purpose (task data, order of samples, replay, model weights, dropout) has its own generator derived from the
seed and the purpose's name, so what one part draws never shifts what another part sees.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Streams:
    """The named generators of one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._pickers: dict[str, random.Random] = {}
        self._ambient: torch.Tensor | None = None

    def derived(self, name: str) -> int:
        """A 63-bit seed for the named purpose."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def generator(self, name: str) -> torch.Generator:
        """The CPU generator for the named purpose; the same object every time."""
        if name not in self._generators:
            self._generators[name] = torch.Generator().manual_seed(self.derived(name))
        return self._generators[name]

    def picker(self, name: str) -> random.Random:
        """Python's generator for the named purpose, which picks a few indices out of many cheaply."""
        if name not in self._pickers:
            self._pickers[name] = random.Random(self.derived(name))
        return self._pickers[name]

    @contextmanager
    def ambient(self, device: torch.device) -> Iterator[None]:
        """Put this run's stream in the place of torch's global generator (dropout can use no other), then give
        the user's global state back as it was.
        """
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if self._ambient is None:
                torch.manual_seed(self.derived("ambient"))
            else:
                _set_global_state(self._ambient, device)
            try:
                yield
            finally:
                self._ambient = _global_state(device)


def _global_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_global_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
