"""The replay buffer on its own: any nest of tensors, a uniform sample, its own generators."""

from __future__ import annotations

import io
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import steppe
from steppe.methods.parts.reservoir import Reservoir
from steppe.runtime.rng import Streams


def test_it_draws_what_a_learners_buffer_draws() -> None:
    buffer, reservoir = steppe.ReservoirBuffer(7, seed=5), Reservoir.from_streams(7, Streams(5))
    for start in range(0, 60, 6):
        x, y = torch.randn(6, 3), torch.arange(start, start + 6)
        buffer.add({"x": x, "rest": (y,)})
        reservoir.add(steppe.Batch(x, y, torch.zeros_like(y)))
        mine, its = buffer.sample(4), reservoir.sample(4)
        assert mine is not None
        assert its is not None
        assert torch.equal(mine["x"], its.x)
        assert torch.equal(mine["rest"][0], its.y)


def test_it_is_a_uniform_sample() -> None:
    """Each of 20 samples is kept with probability 5 / 20."""
    counts: Counter[int] = Counter()
    for seed in range(2000):
        buffer = steppe.ReservoirBuffer(5, seed=seed)
        for part in torch.arange(20).split(3):
            buffer.add(part)
        kept = buffer.sample(5)
        assert kept is not None
        counts.update(kept.tolist())
        assert len(set(kept.tolist())) == 5
    assert all(abs(counts[number] - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for number in range(20))


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: x,
        lambda x: (x, x + 1),
        lambda x: {"ids": x, "more": {"mask": x > 2, "pair": [x, x.to(torch.uint8)]}},
    ],
)
def test_nests_stay_together(nest: Any) -> None:
    buffer = steppe.ReservoirBuffer(4)
    for part in torch.arange(12).split(5):
        buffer.add(nest(part))
    drawn = buffer.sample(3)
    first = drawn if isinstance(drawn, Tensor) else drawn[0] if isinstance(drawn, tuple) else drawn["ids"]
    expected = nest(first)
    assert repr(drawn) == repr(expected)
    joined = buffer.join(nest(torch.arange(2)), 3)
    assert type(joined) is type(expected)
    assert steppe.ReservoirBuffer(4).join(nest(torch.arange(2)), 3) is not None


def test_sizes_and_bytes() -> None:
    buffer = steppe.ReservoirBuffer(4)
    assert (len(buffer), buffer.sample(2), buffer.memory_bytes()) == (0, None, 0)
    buffer.add((torch.zeros(2, 3), torch.zeros(2, dtype=torch.uint8)))
    assert (len(buffer), buffer.memory_bytes()) == (2, 4 * (3 * 4 + 1))
    drawn = buffer.sample(9)
    assert drawn is not None
    assert len(drawn[0]) == 2


def test_sequences_of_different_lengths() -> None:
    buffer = steppe.ReservoirBuffer(4)
    for lengths in ((3, 1), (5, 2), (4, 4)):
        words = steppe.Ragged([torch.full((length,), length) for length in lengths])
        buffer.add({"words": words, "labels": torch.tensor(lengths)})
    drawn = buffer.sample(4)
    assert drawn is not None
    assert [row.tolist() for row in drawn["words"].rows] == [[length] * length for length in drawn["labels"].tolist()]
    longest = int(drawn["labels"].max())
    assert drawn["words"].padded(0).shape == (4, longest)


def test_it_keeps_no_graph_and_shares_no_memory() -> None:
    buffer = steppe.ReservoirBuffer(4)
    x = torch.ones(3, 2, requires_grad=True)
    buffer.add(x * 2)
    kept = buffer.sample(3)
    assert kept is not None
    assert not kept.requires_grad
    kept.zero_()
    again = buffer.sample(3)
    assert again is not None
    assert bool((again == 2).all())


def test_global_generators_are_left_alone() -> None:
    states = torch.get_rng_state(), random.getstate()
    buffer = steppe.ReservoirBuffer(3)
    buffer.add(torch.arange(50))
    buffer.sample(2)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_restored_buffer_goes_on_with_the_same_draws() -> None:
    buffer = steppe.ReservoirBuffer(5, seed=2)
    buffer.add({"x": torch.arange(20), "y": torch.arange(20) * 2})
    buffer.sample(2)
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    other = steppe.ReservoirBuffer(5, seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    for one in (buffer, other):
        one.add({"x": torch.arange(20, 60), "y": torch.arange(20, 60) * 2})
    mine, its = buffer.sample(4), other.sample(4)
    assert mine is not None
    assert its is not None
    assert torch.equal(mine["x"], its["x"])
    assert (len(other), other.num_seen) == (5, 60)


def test_wrong_input() -> None:
    with pytest.raises(steppe.UsageError, match="capacity = 0 is invalid; it must be at least 1"):
        steppe.ReservoirBuffer(0)
    with pytest.raises(steppe.UsageError, match=r"seed = 1\.5 is not an int"):
        steppe.ReservoirBuffer(1, seed=1.5)  # type: ignore[arg-type]
    buffer = steppe.ReservoirBuffer(3)
    with pytest.raises(steppe.DataError, match=r"the batch has 3 samples in '\[0\]' but 2 in '\[1\]'"):
        buffer.add((torch.zeros(3), torch.zeros(2)))
    with pytest.raises(steppe.DataError, match="the batch has an input of type str; expected a tensor"):
        buffer.add("text")
    buffer.add(torch.zeros(2, 4))
    with pytest.raises(steppe.DataError, match=r"shape \(5,\) cannot be .* shape \(4,\): pad sequences to one"):
        buffer.add(torch.zeros(2, 5))
    state = buffer.state_dict()
    with pytest.raises(steppe.UsageError, match="create the buffer with the same capacity"):
        steppe.ReservoirBuffer(1).load_state_dict(state)
    for wrong in (None, {}, {**state, "streams": 3}, {**state, "seen": -1}, {**state, "stored": "text"}):
        with pytest.raises(steppe.UsageError, match="state of a buffer"):
            buffer.load_state_dict(wrong)
    assert len(buffer) == 2
