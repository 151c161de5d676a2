"""One seed, many independent named streams: nothing random in `steppe` comes from anywhere else.

Each purpose (task data, order of samples, replay, model weights, dropout) has its own generator derived from the
seed and the purpose's name, so what one part draws never shifts what another part sees.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from steppe.runtime.turns import GENERATORS

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

    def python_rng(self, name: str) -> random.Random:
        """Python's generator for the named purpose, which picks a few indices out of many cheaply."""
        if name not in self._pickers:
            self._pickers[name] = random.Random(self.derived(name))
        return self._pickers[name]

    @contextmanager
    def as_global_rng(self, device: torch.device) -> Iterator[None]:
        """Put this run's streams in the place of torch's global generators, of the CPU and of the device (dropout can
        use no others), then give the user's global state back as it was.
        """
        with _borrowing(Borrowed(device, self)):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Where every stream has got to."""
        ambient = [generator.get_state() for generator in self._borrowed] if self._borrowed else self._ambient
        return {
            "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            "pickers": {name: _words(picker) for name, picker in self._pickers.items()},
            "ambient": ambient,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
            self.python_rng(name).setstate((version, tuple(inner), None))
        self._ambient = [value.cpu() for value in state["ambient"]]
        for generator, value in zip(self._borrowed, self._ambient, strict=False):
            generator.set_state(value)


def _words(picker: random.Random) -> torch.Tensor:
    """The state of Python's generator as numbers; what it keeps between two Gaussian draws is never there, as nothing
    here draws them.
    """
    version, inner, _ = picker.getstate()
    return torch.tensor([version, *inner], device="cpu")


class Borrowed:
    """torch's global generators, of the CPU and of the device, while they run another sequence than their user's: that
    of some streams, or one from a seed, or the user's own, of which nothing is then used up. One thread at a time may
    borrow them. Every step can be taken again where it was broken off.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None, seed: int | None = None) -> None:
        self._generators = _global_generators(device)
        self._streams, self._seed = streams, seed
        self._own: list[torch.Tensor] = []  # where the sequence has got to, if it is no stream's
        self._found: list[torch.Tensor] = []
        self._stage: Literal["out", "entering", "in", "leaving"] = "out"
        self._depth: int | None = None

    def begin(self) -> None:
        """Wait for one's turn, and let them run the other sequence."""
        self._depth = GENERATORS.depth
        GENERATORS.take()
        self._found = [generator.get_state() for generator in self._generators]
        self._stage = "entering"
        own = self._own if self._streams is None else self._streams._ambient
        seed = self._seed if self._streams is None else self._streams.derived("ambient")
        for place, generator in enumerate(self._generators):
            if place < len(own):
                generator.set_state(own[place])
            elif seed is not None:
                generator.manual_seed(seed)
        if self._streams is not None:
            self._streams._borrowed = self._generators
        self._stage = "in"

    def end(self) -> None:
        """Give them back as they were; to be begun again, the sequence goes on from where it is."""
        if self._depth is None:
            return
        if self._stage == "in":
            self._own = [generator.get_state() for generator in self._generators]
            if self._streams is not None:
                self._streams._ambient, self._streams._borrowed = self._own, []
            self._stage = "leaving"
        if self._stage != "out":
            for generator, state in zip(self._generators, self._found, strict=True):
                generator.set_state(state)
            self._stage = "out"
        if self._streams is not None:
            self._streams._borrowed = []
        GENERATORS.reduce_to(self._depth)


@contextmanager
def _borrowing(borrowed: Borrowed) -> Iterator[None]:
    try:
        borrowed.begin()
        yield
    finally:
        borrowed.end()


@contextmanager
def preserve_global_rng(device: torch.device = _CPU, seed: int | None = None) -> Iterator[None]:
    """Whatever draws from torch's global generators inside, the CPU's and the device's, seeded or not, leaves them as
    they were found.
    """
    with _borrowing(Borrowed(device, seed=seed)):
        yield


def _global_generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's generator, and the device's where it has one of its own."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
