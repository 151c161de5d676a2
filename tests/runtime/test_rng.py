"""Named streams: independent of one another and of the global generators, and the same for the same seed."""

from __future__ import annotations

import random

import pytest
import torch

from steppe.runtime.rng import Streams

CPU = torch.device("cpu")


def test_a_name_gives_the_same_object_every_time() -> None:
    streams = Streams(3)
    assert streams.generator("order") is streams.generator("order")
    assert streams.python_rng("order") is streams.python_rng("order")
    assert streams.generator("order") is not streams.generator("other")


def test_streams_are_independent() -> None:
    """Draws from one stream, or its existence, do not affect another."""
    busy, quiet = Streams(3), Streams(3)
    torch.rand(100, generator=busy.generator("a"))
    busy.python_rng("b").random()
    with busy.as_global_rng(CPU):
        torch.rand(7)
    assert torch.equal(torch.rand(5, generator=busy.generator("c")), torch.rand(5, generator=quiet.generator("c")))
    assert busy.python_rng("d").random() == quiet.python_rng("d").random()


def test_seeds_and_names_give_different_streams() -> None:
    seeds = {Streams(seed).derive_seed(name) for seed in range(50) for name in ("a", "b", "1/a", "")}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert Streams(7).derive_seed("order") == Streams(7).derive_seed("order")


@pytest.mark.parametrize("fails", [False, True])
def test_as_global_rng_restores_the_global_generator(fails: bool) -> None:
    """The stream continues where it stopped, whatever happened outside; Python's generator is not affected."""
    streams, twin = Streams(3), Streams(3)
    with twin.as_global_rng(CPU):
        expected = torch.rand(6)
    found, python = torch.get_rng_state(), random.getstate()
    try:
        with streams.as_global_rng(CPU):
            first = torch.rand(2)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert torch.equal(torch.get_rng_state(), found)
    assert random.getstate() == python
    torch.rand(11)
    with streams.as_global_rng(CPU):
        rest = torch.rand(4)
    assert torch.equal(torch.cat((first, rest)), expected)
