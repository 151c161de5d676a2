"""Ragged: each operation against the list of its rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steppe.errors import DataError
from steppe.tensors.nest import concat_nests, index_nest, nest_bytes, nest_length, require_same_structure
from steppe.tensors.ragged import Ragged


@st.composite
def rows(draw: st.DrawFn) -> list[Tensor]:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    features = draw(st.sampled_from([(), (2,), (2, 3)]))
    return [torch.randn(length, *features) for length in lengths]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@given(rows(), st.data())
def test_a_ragged_is_its_rows(given: list[Tensor], data: st.DataObject) -> None:
    made = Ragged(given)
    places = data.draw(st.lists(st.integers(0, len(given) - 1), max_size=5))
    assert len(made) == nest_length(made) == len(given)
    assert made.nbytes == nest_bytes(made) == sum(row.numel() * 4 for row in given)
    assert made.shape == (len(given), None, *given[0].shape[1:])
    assert made.lengths().tolist() == [len(row) for row in given]
    assert same(made[torch.tensor(places, dtype=torch.int64)].rows, [given[place] for place in places])
    keep = torch.tensor([place % 2 == 0 for place in range(len(given))])
    assert same(made[keep].rows, given[::2])
    assert same(index_nest(made, slice(1, 3)).rows, given[1:3])
    assert same(concat_nests([made, made]).rows, [*given, *given])
    assert same(Ragged.from_flat(made.flat(), made.lengths()).rows, given)
    assert same(made.to(torch.float64).rows, [row.double() for row in given])
    padded = made.padded(7)
    for row, full in zip(given, padded, strict=True):
        assert torch.equal(full[: len(row)], row)
        assert bool((full[len(row) :] == 7).all())


def test_slots_hold_copies_of_their_own() -> None:
    batch = torch.arange(12).reshape(4, 3)
    slots = Ragged.empty_slots(Ragged(batch.unbind()), 3)
    slots[torch.tensor([2, 0])] = Ragged([batch[1], batch[3][:2]])
    slots[1:2] = Ragged([batch[0]])
    assert [row.tolist() for row in slots.rows] == [[9, 10], [0, 1, 2], [3, 4, 5]]
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in slots.rows)
    assert slots.clone().rows[0].data_ptr() != slots.rows[0].data_ptr()


def test_tensors_join_sequences() -> None:
    joined = concat_nests([Ragged([torch.arange(2)]), torch.arange(6).reshape(2, 3)])
    assert [row.tolist() for row in joined.rows] == [[0, 1], [0, 1, 2], [3, 4, 5]]
    require_same_structure(Ragged([torch.arange(2)]), Ragged([torch.arange(5)]))
    with pytest.raises(DataError, match="cannot be stored together"):
        require_same_structure(Ragged([torch.zeros(2, 3)]), Ragged([torch.zeros(2, 4)]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([torch.zeros(2), torch.zeros(2, 3)], r"features \(\) and, in sample 1, of torch.float32 with features \(3,\)"),
        ([torch.zeros(2), torch.zeros(2).int()], "sample 1, of torch.int32"),
        ([torch.zeros(2), 3.0], "of type float"),
        ([torch.tensor(1.0)], "a single number"),
    ],
)
def test_rows_that_do_not_belong_together(given: list[Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Ragged(given)
