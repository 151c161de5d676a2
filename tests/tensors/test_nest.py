"""Nests of tensors: each function against the same operation leaf by leaf."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import DataError, ShapesDifferError
from steppe.tensors.nest import (
    concat_nests,
    index_nest,
    leaves,
    map_nest,
    named_leaves,
    nest_bytes,
    nest_length,
    require_same_structure,
)

Point = namedtuple("Point", ["left", "right"])


def nests(count: int) -> st.SearchStrategy[Any]:
    """Nests with this many samples."""
    tensors = st.lists(st.integers(1, 3), max_size=2).map(
        lambda shape: torch.arange(count * torch.Size(shape).numel()).reshape(count, *shape)
    )
    return st.recursive(
        tensors,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.tuples(inner, inner).map(lambda parts: Point(*parts)),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(UserDict),
        ),
        max_leaves=5,
    )


def equal(one: Any, other: Any) -> bool:
    """Whether two nests have the same names and bits; the slow reference for comparing leaf by leaf."""
    mine, its = list(named_leaves(one)), list(named_leaves(other))
    return [name for name, _ in mine] == [name for name, _ in its] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(mine, its, strict=True)
    )


@given(nests(5))
def test_length_bytes_and_leaves(nest: Any) -> None:
    assert nest_length(nest) == 5
    assert nest_bytes(nest) == sum(leaf.numel() * 8 for leaf in leaves(nest))
    assert len(leaves(nest)) == len(list(named_leaves(nest)))


@given(nests(5), st.lists(st.integers(0, 4), max_size=6))
def test_index_and_concat_are_those_of_every_leaf(nest: Any, places: list[int]) -> None:
    for index in (slice(1, 4), torch.tensor(places, dtype=torch.int64)):
        part = index_nest(nest, index)
        assert [leaf.tolist() for leaf in leaves(part)] == [leaf[index].tolist() for leaf in leaves(nest)]
    halves = index_nest(nest, slice(0, 2)), index_nest(nest, slice(2, 5))
    assert equal(concat_nests(halves), nest)


@given(nests(2))
def test_a_nest_has_its_own_structure(nest: Any) -> None:
    require_same_structure(nest, nest)
    require_same_structure(nest, map_nest(torch.clone, nest))


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_any_mapping_becomes_a_dict(kind: type) -> None:
    mapped = map_nest(lambda leaf: leaf * 2, kind(a=torch.ones(1), b=[torch.ones(2)]))
    assert type(mapped) is dict
    assert type(mapped["b"]) is list
    assert [leaf.tolist() for leaf in leaves(mapped)] == [[2.0], [2.0, 2.0]]


def test_named_tuples_stay() -> None:
    mapped = map_nest(lambda leaf: leaf + 1, Point(torch.zeros(1), (torch.ones(1),)))
    assert isinstance(mapped, Point)
    assert mapped.left.item() == 1
    assert mapped.right[0].item() == 2


def test_others_are_matched_by_key() -> None:
    one, other = {"a": torch.tensor([1]), "b": torch.tensor([2])}, {"b": torch.tensor([20]), "a": torch.tensor([10])}
    assert map_nest(lambda a, b: int(a + b), one, other) == {"a": 11, "b": 22}
    assert [leaf.tolist() for leaf in leaves(concat_nests([one, other]))] == [[1, 10], [2, 20]]


@pytest.mark.parametrize(
    ("nest", "message"),
    [
        ({"ids": torch.zeros(4), "mask": torch.zeros(3)}, r"has 4 samples in 'ids' but 3 in 'mask'"),
        ((torch.zeros(2), {"deep": [torch.zeros(2), torch.zeros(5)]}), r"in '\[0\]' but 5 in '\[1\]\.deep\[1\]'"),
        ({"ids": torch.zeros(4), "text": "hello"}, r"has 'text' of type str"),
        ({"ids": torch.zeros(4), "none": None}, r"has 'none' of type NoneType"),
        ({"ids": torch.tensor(4.0)}, r"has 'ids' without dimensions"),
        (torch.tensor(4.0), r"has an input without dimensions"),
        ({}, r"has no tensor"),
        (([], {}), r"has no tensor"),
    ],
)
def test_invalid_nests_are_rejected(nest: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        nest_length(nest)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}, "the keys 'a' cannot .* keys 'a', 'b'"),
        ({"a": torch.zeros(1)}, torch.zeros(1), "keys 'a' cannot be stored together with inputs of one tensor"),
        ((torch.zeros(1),), (torch.zeros(1),) * 2, "of 1 parts cannot be stored together with inputs of 2 parts"),
        ({"a": torch.zeros(1, 3)}, {"a": torch.zeros(1, 4)}, r"inputs \('a'\) of shape \(3,\) .* shape \(4,\)"),
        (torch.zeros(1, 3), torch.zeros(1, 4), r"inputs of shape \(3,\) cannot .* of shape \(4,\)"),
    ],
)
def test_nests_that_cannot_be_stored_together(one: Any, other: Any, message: str) -> None:
    with pytest.raises(ShapesDifferError, match=message):
        require_same_structure(one, other)
    with pytest.raises(ShapesDifferError, match=message):
        concat_nests([one, other])
