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

from steppe.state import State

_CPU = torch.device("cpu")


class Streams:
    """The named generators of one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._pickers: dict[str, random.Random] = {}
        self._ambient: list[torch.Tensor] = []
        self._borrowed: list[torch.Generator] = []  # torch's global generators while they run this run's streams

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
        self._borrowed = generators
        try:
            yield
        finally:
            self._ambient = [generator.get_state() for generator in generators]
            self._borrowed = []
            for generator, state in zip(generators, found, strict=True):
                generator.set_state(state)

    def state(self) -> State:
        """Where every stream has got to."""
        ambient = [generator.get_state() for generator in self._borrowed] if self._borrowed else self._ambient
        return {
            "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            "pickers": {name: _words(picker) for name, picker in self._pickers.items()},
            "ambient": ambient,
        }

    def load_state(self, state: State) -> None:
        """Every stream goes on from there, in the generators that were handed out; one that the state does not know had
        not been drawn from.
        """
        for name in self._generators.keys() - state["generators"].keys():
            self._generators[name].manual_seed(self.derived(name))
        for name in self._pickers.keys() - state["pickers"].keys():
            self._pickers[name].seed(self.derived(name))
        for name, value in state["generators"].items():
            self.generator(name).set_state(value.cpu())
        for name, words in state["pickers"].items():
            version, *inner = words.tolist()
            self.picker(name).setstate((version, tuple(inner), None))
        self._ambient = [value.cpu() for value in state["ambient"]]
        for generator, value in zip(self._borrowed, self._ambient, strict=False):
            generator.set_state(value)


def _words(picker: random.Random) -> torch.Tensor:
    """The state of Python's generator as numbers; what it keeps between two Gaussian draws is never there, as nothing
    here draws them.
    """
    version, inner, _ = picker.getstate()
    return torch.tensor([version, *inner], device="cpu")


@contextmanager
def borrowed_global_generator(device: torch.device = _CPU, seed: int | None = None) -> Iterator[None]:
    """Whatever draws from torch's global generators inside, the CPU's and the device's, seeded or not, leaves them as
    they were found.
    """
    generators = _global_generators(device)
    found = [generator.get_state() for generator in generators]
    if seed is not None:
        for generator in generators:
            generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, found, strict=True):
            generator.set_state(state)


def _global_generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's generator, and the device's where it has one of its own."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
