"""Random numbers: one seed, many independent named streams, and torch's global generators.

Each purpose (order of samples, replay, model weights, dropout, …) has its own generator, derived from the seed and the
purpose's name, so that draws by one part never change what another part draws. Nothing random in `steppe` comes from
anywhere else.

Dropout can only draw from torch's global generators. A learner therefore puts its own stream in their place while it
works, and holds `GLOBAL_RNG_LOCK` meanwhile.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from steppe.runtime.locks import FairLock

GLOBAL_RNG_LOCK = FairLock()
"""Held by the thread whose random sequence torch's global generators currently produce."""

_CPU = torch.device("cpu")


class Streams:
    """The named random number generators of one run.

    The names are hashed into the seeds: renaming a stream changes all numbers drawn from it.

    Example:
        >>> streams = Streams(0)
        >>> streams.generator("order") is streams.generator("order")
        True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._pickers: dict[str, random.Random] = {}
        self._ambient: list[torch.Tensor] = []
        self._installed: list[torch.Generator] = []  # torch's global generators, while they run this run's stream

    def derive_seed(self, name: str) -> int:
        """A 63-bit seed for the purpose `name`."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def generator(self, name: str) -> torch.Generator:
        """The CPU generator for the purpose `name`; the same object every time."""
        if name not in self._generators:
            self._generators[name] = torch.Generator().manual_seed(self.derive_seed(name))
        return self._generators[name]

    def python_rng(self, name: str) -> random.Random:
        """Python's generator for the purpose `name`; cheaper than torch's for drawing a few indices out of many."""
        if name not in self._pickers:
            self._pickers[name] = random.Random(self.derive_seed(name))
        return self._pickers[name]

    @contextmanager
    def as_global_rng(self, device: torch.device) -> Iterator[None]:
        """Let torch's global generators, the CPU's and the device's, run this run's stream inside; the user's state is
        restored afterwards.
        """
        with _acquired(GlobalRNG(device, self)):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state of every stream."""
        ambient = [generator.get_state() for generator in self._installed] if self._installed else self._ambient
        return {
            "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            "pickers": {name: _python_rng_state(picker) for name, picker in self._pickers.items()},
            "ambient": ambient,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore every stream, in the generator objects handed out so far. Streams that the state lacks had not been
        drawn from, and start anew.
        """
        for name in self._generators.keys() - state["generators"].keys():
            self._generators[name].manual_seed(self.derive_seed(name))
        for name in self._pickers.keys() - state["pickers"].keys():
            self._pickers[name].seed(self.derive_seed(name))
        for name, value in state["generators"].items():
            self.generator(name).set_state(value.cpu())
        for name, words in state["pickers"].items():
            version, *inner = words.tolist()
            self.python_rng(name).setstate((version, tuple(inner), None))
        self._ambient = [value.cpu() for value in state["ambient"]]
        for generator, value in zip(self._installed, self._ambient, strict=False):
            generator.set_state(value)


def _python_rng_state(picker: random.Random) -> torch.Tensor:
    """The state of a Python generator as a tensor, without the part for Gaussian draws, which nothing here makes."""
    version, inner, _ = picker.getstate()
    return torch.tensor([version, *inner], device="cpu")


class GlobalRNG:
    """torch's global generators, the CPU's and the device's, running a sequence other than the user's.

    `acquire` waits for `GLOBAL_RNG_LOCK`, saves the user's state and installs the sequence; `release` puts the user's
    state back. Acquired again, the sequence continues where it stopped. Every step can be repeated after an exception.

    Args:
        device: The device whose generator is installed besides the CPU's.
        streams: Run the stream of these.
        seed: Without `streams`: start from this seed; None continues from the user's own state.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None, seed: int | None = None) -> None:
        self._generators = _global_generators(device)
        self._streams, self._seed = streams, seed
        self._own: list[torch.Tensor] = []  # the sequence's state between `release` and `acquire`
        self._user: list[torch.Tensor] = []
        self._stage: Literal["out", "entering", "in", "leaving"] = "out"
        self._depth: int | None = None

    def acquire(self) -> None:
        """Wait for the lock, and install the sequence."""
        self._depth = GLOBAL_RNG_LOCK.depth
        GLOBAL_RNG_LOCK.acquire()
        self._user = [generator.get_state() for generator in self._generators]
        self._stage = "entering"
        own = self._own if self._streams is None else self._streams._ambient
        seed = self._seed if self._streams is None else self._streams.derive_seed("ambient")
        for place, generator in enumerate(self._generators):
            if place < len(own):
                generator.set_state(own[place])
            elif seed is not None:
                generator.manual_seed(seed)
        if self._streams is not None:
            self._streams._installed = self._generators
        self._stage = "in"

    def release(self) -> None:
        """Restore the user's state, and release the lock; does nothing the second time."""
        if self._depth is None:
            return
        if self._stage == "in":
            self._own = [generator.get_state() for generator in self._generators]
            if self._streams is not None:
                self._streams._ambient, self._streams._installed = self._own, []
            self._stage = "leaving"
        if self._stage != "out":
            for generator, state in zip(self._generators, self._user, strict=True):
                generator.set_state(state)
            self._stage = "out"
        if self._streams is not None:
            self._streams._installed = []
        GLOBAL_RNG_LOCK.release_to(self._depth)


@contextmanager
def _acquired(rng: GlobalRNG) -> Iterator[None]:
    try:
        rng.acquire()
        yield
    finally:
        rng.release()


@contextmanager
def preserve_global_rng(device: torch.device = _CPU, seed: int | None = None) -> Iterator[None]:
    """Restore torch's global generators, the CPU's and the device's, after code that draws from or seeds them."""
    with _acquired(GlobalRNG(device, seed=seed)):
        yield


def _global_generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's generator, and the device's where it has one of its own."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
