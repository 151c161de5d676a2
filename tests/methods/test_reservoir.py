"""The reservoir against a list filled sample by sample, and against the uniform distribution."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import ListReservoir
from scipy.stats import chisquare

from steppe.checkpoint.tree import flatten_tree, unflatten_tree
from steppe.errors import UsageError
from steppe.methods.parts.reservoir import Reservoir
from steppe.tensors.batch import Batch


def numbered(start: int, count: int) -> Batch:
    """Samples whose input, label and task are their own number."""
    numbers = torch.arange(start, start + count)
    return Batch(numbers[:, None].float(), numbers, numbers + 1000)


def reservoir(capacity: int, seed: int = 0) -> Reservoir:
    return Reservoir(capacity, random.Random(seed), random.Random(seed + 1))


def contents(buffer: Reservoir) -> list[int]:
    everything = buffer.sample(len(buffer))
    return [] if everything is None else sorted(everything.y.tolist())


@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 10_000))
def test_adding_batches_equals_adding_samples(capacity: int, sizes: list[int], seed: int) -> None:
    """With the same random stream; inputs, labels and tasks stay together."""
    buffer = reservoir(capacity, seed)
    twin = ListReservoir(capacity, random.Random(seed), random.Random(seed + 1))
    start = 0
    for size in sizes:
        buffer.add(numbered(start, size))
        for number in range(start, start + size):
            twin.push(number)
        start += size
        assert len(buffer) == len(twin.items) == min(start, capacity)
        for count in (1, capacity, capacity + 5):
            drawn = buffer.sample(count)
            assert drawn is not None
            assert drawn.y.tolist() == twin.draw(count)
            assert torch.equal(drawn.x[:, 0].long(), drawn.y)
            assert torch.equal(drawn.task, drawn.y + 1000)


@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 9), min_size=2, max_size=8),
    st.integers(0, 10_000),
    st.booleans(),
    st.data(),
)
def test_restored_reservoir_continues_exactly(
    capacity: int, sizes: list[int], seed: int, with_extras: bool, data: st.DataObject
) -> None:
    """Its content is a subset of the samples added, each once, with its own extras."""
    ways = random.Random(seed), random.Random(seed + 1)
    buffer = Reservoir(capacity, *ways)
    broken = data.draw(st.integers(0, len(sizes)))
    for place, size in enumerate(sizes):
        if place == broken:
            kept, tensors = flatten_tree(buffer.state_dict())
            again = Reservoir(capacity, *ways)
            again.load_state_dict(unflatten_tree(kept, tensors))
            buffer = again
        start = sum(sizes[:place])
        batch = numbered(start, size)
        buffer.add(batch, -batch.x if with_extras else None)
    twin = ListReservoir(capacity, random.Random(seed), random.Random(seed + 1))
    for number in range(sum(sizes)):
        twin.push(number)
    assert contents(buffer) == sorted(twin.items)
    assert len(set(twin.items)) == len(buffer) == min(capacity, sum(sizes))
    drawn = buffer.sample_with_extras(len(buffer))
    assert (drawn is not None) == with_extras
    if drawn is not None:
        assert torch.equal(drawn[0].x, -drawn[1])


@pytest.mark.parametrize(
    "change",
    [{"age": -1}, {"age": 2}, {"age": 10**30}, {"age": "3"}, {"stored": numbered(0, 9)}, {"notes": torch.zeros(1)}],
)
def test_inconsistent_state_is_rejected(change: dict[str, object]) -> None:
    buffer = reservoir(5)
    buffer.add(numbered(0, 3))
    with pytest.raises((ValueError, TypeError)):
        reservoir(5).load_state_dict({**buffer.state_dict(), **change})


def test_buffer_larger_than_memory_is_an_error() -> None:
    with pytest.raises(UsageError, match="not enough memory for 1,000,000,000,000,000 samples"):
        reservoir(10**15).add(numbered(0, 3))


def test_every_sample_is_kept_with_equal_probability() -> None:
    """Over many seeds, for the first sample added and for the last."""
    kept: Counter[int] = Counter()
    for seed in range(1500):
        buffer = reservoir(4, 2 * seed)
        for start in (0, 6, 9):
            buffer.add(numbered(start, 6 if start == 0 else 3))
        kept.update(contents(buffer))
    assert chisquare([kept[number] for number in range(12)]).pvalue > 1e-4


def test_draws_are_distinct_and_uniform() -> None:
    buffer = reservoir(10, 3)
    buffer.add(numbered(0, 10))
    drawn: Counter[int] = Counter()
    pairs: Counter[frozenset[int]] = Counter()
    for _ in range(3000):
        batch = buffer.sample(2)
        assert batch is not None
        labels = batch.y.tolist()
        assert len(set(labels)) == 2
        drawn.update(labels)
        pairs[frozenset(labels)] += 1
    assert chisquare([drawn[number] for number in range(10)]).pvalue > 1e-4
    assert chisquare(list(pairs.values())).pvalue > 1e-4
    assert len(pairs) == 45


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.int64])
def test_samples_keep_their_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(250, 256).repeat(2, 2, 1).to(dtype)
    buffer = reservoir(5)
    buffer.add(Batch(x, torch.tensor([1, 2]), torch.tensor([0, 0])))
    drawn = buffer.sample(2)
    assert drawn is not None
    assert drawn.x.dtype == dtype
    assert torch.equal(drawn.x, x)
    assert buffer.memory_bytes() == 5 * (12 * x.element_size() + 8 + 8)


def test_sampled_and_added_batches_are_copies() -> None:
    """Changing a batch in place does not change the buffer."""
    buffer, pushed = reservoir(3), numbered(0, 3)
    buffer.add(pushed)
    pushed.x.zero_()
    drawn = buffer.sample(3)
    assert drawn is not None
    drawn.x.add_(100)
    again = buffer.sample(3)
    assert again is not None
    assert sorted(again.x[:, 0].tolist()) == [0.0, 1.0, 2.0]


def test_an_empty_buffer_gives_none() -> None:
    buffer = reservoir(3)
    assert buffer.sample(5) is None
    assert (len(buffer), buffer.memory_bytes()) == (0, 0)
