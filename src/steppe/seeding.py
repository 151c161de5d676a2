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
        self._ambient: list[torch.Tensor] = []

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
        """Put this run's streams in the place of torch's global generators, of the CPU and of the device (dropout can
        use no others), then give the user's global state back as it was.
        """
        generators = _global_generators(device)
        found = [generator.get_state() for generator in generators]
        for place, generator in enumerate(generators):
            if len(self._ambient) > place:
                generator.set_state(self._ambient[place])
            else:
                generator.manual_seed(self.derived("ambient"))
        try:
            yield
        finally:
            self._ambient = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, found, strict=True):
                generator.set_state(state)


@contextmanager
def borrowed_global_generator(seed: int | None = None) -> Iterator[None]:
    """Whatever draws from torch's global CPU generator inside, seeded or not, leaves it as it was found."""
    generator = torch.default_generator
    found = generator.get_state()
    if seed is not None:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(found)


def _global_generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's generator, and the device's where it has one of its own."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
