"""Nests of tensors: a tensor, or dictionaries, tuples and lists of nests, with the samples along the first dimension.

Any mapping counts as a dictionary (a tokenizer's output, say) and comes back as a `dict`; named tuples stay what they
are. A leaf may also be `Ragged`. torch's own tree functions are private, and take a tokenizer's output for a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from steppe.errors import DataError, ShapesDifferError
from steppe.runtime.devices import to_device
from steppe.tensors.ragged import Ragged

Nest = Any
"""A tensor or `Ragged`, or a mapping, tuple or list of nests. A mapping's keys are names of the model's arguments, or
0, 1, … for arguments without a name."""

Leaf = Tensor | Ragged


def map_nest(function: Callable[..., Any], nest: Nest, *others: Nest) -> Nest:
    """Apply a function to every leaf.

    Args:
        function: Gets a leaf of `nest`, and the leaves in the same place of the others.
        nest: The nest.
        others: Nests of the same structure; see `require_same_structure`.

    Returns:
        A nest of the results, in the structure of `nest`.

    Raises:
        ValueError: The structures differ.

    Example:
        >>> map_nest(lambda leaf: leaf + 1, {"a": torch.tensor([1]), "b": (torch.tensor([2]),)})
        {'a': tensor([2]), 'b': (tensor([3]),)}
    """
    if isinstance(nest, Tensor):
        return function(nest, *others)
    if isinstance(nest, Mapping):
        if any(not isinstance(other, Mapping) or other.keys() != nest.keys() for other in others):
            raise ValueError("the nests have different keys")
        return {key: map_nest(function, nest[key], *(other[key] for other in others)) for key in nest}
    if isinstance(nest, (tuple, list)):
        if any(not isinstance(other, (tuple, list)) for other in others):  # a tensor would be split into rows
            raise ValueError("the nests have different structures")
        parts = [map_nest(function, *places) for places in zip(nest, *others, strict=True)]
        return type(nest)(*parts) if hasattr(nest, "_fields") else tuple(parts) if isinstance(nest, tuple) else parts
    return function(nest, *others)


def named_leaves(nest: Nest, name: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves with their names, such as `ids` or `images[0]`; the name of a lone tensor is empty."""
    if isinstance(nest, Mapping):
        for key in nest:
            yield from named_leaves(nest[key], f"{name}.{key}" if name else str(key))
    elif isinstance(nest, (tuple, list)):
        for place, part in enumerate(nest):
            yield from named_leaves(part, f"{name}[{place}]")
    else:
        yield name, nest


def leaves(nest: Nest) -> list[Any]:
    """Return the leaves, in order.

    Example:
        >>> leaves({"a": torch.tensor(1), "b": [torch.tensor(2), torch.tensor(3)]})
        [tensor(1), tensor(2), tensor(3)]
    """
    return [nest] if isinstance(nest, Tensor) else [leaf for _, leaf in named_leaves(nest)]


def nest_length(nest: Nest) -> int:
    """Return the number of samples: the size of every leaf's first dimension.

    Raises:
        DataError: The leaves disagree, there are none, or one is no tensor or a scalar. The message begins with a
            verb ("has …"), for the caller to put in front what it is about.

    Example:
        >>> nest_length({"ids": torch.zeros(4, 7), "mask": torch.ones(4)})
        4
    """
    if isinstance(nest, Tensor) and nest.ndim:
        return nest.shape[0]
    found: dict[int, str] = {}
    for name, leaf in named_leaves(nest):
        if not isinstance(leaf, (Tensor, Ragged)):
            raise DataError(f"has {_quoted(name)}of type {type(leaf).__name__}; expected a tensor.")
        if leaf.ndim == 0:
            raise DataError(f"has {_quoted(name)}without dimensions; expected the samples along the first dimension.")
        found.setdefault(len(leaf), name)
    if not found:
        raise DataError("has no tensor; expected at least one.")
    if len(found) > 1:
        (first, one), (second, other) = list(found.items())[:2]
        raise DataError(
            f"has {first} samples in {one!r} but {second} in {other!r}; every tensor needs one row per sample."
        )
    return next(iter(found))


def nest_shape(nest: Nest) -> tuple[int | None, ...] | dict[str, tuple[int | None, ...]]:
    """Return the shape, or the shape of every leaf by name, for messages."""
    return (
        tuple(nest.shape) if isinstance(nest, (Tensor, Ragged)) else {n: tuple(t.shape) for n, t in named_leaves(nest)}
    )


def nest_device(nest: Nest) -> torch.device:
    """Return the device of the first leaf."""
    device: torch.device = leaves(nest)[0].device
    return device


def index_nest(nest: Nest, index: slice | Tensor) -> Nest:
    """Return the samples at an index, as from `tensor[index]`.

    Example:
        >>> index_nest((torch.arange(4), torch.arange(4) * 10), slice(1, 3))
        (tensor([1, 2]), tensor([10, 20]))
    """
    return nest[index] if isinstance(nest, Tensor) else map_nest(lambda leaf: leaf[index], nest)


def clone_nest(nest: Nest) -> Nest:
    """Return a copy."""
    return nest.clone() if isinstance(nest, Tensor) else map_nest(lambda leaf: leaf.clone(), nest)


def split_nest(nest: Nest, size: int) -> Sequence[Nest]:
    """Return parts of so many samples, as from `torch.split`."""
    if isinstance(nest, Tensor):
        return torch.split(nest, size)
    return [index_nest(nest, slice(start, start + size)) for start in range(0, max(nest_length(nest), 1), size)]


def nest_to_device(nest: Nest, device: torch.device) -> Nest:
    """Copy every leaf to the device without waiting; see `to_device`."""
    return to_device(nest, device) if isinstance(nest, Tensor) else map_nest(lambda leaf: _move(leaf, device), nest)


def _move(leaf: Leaf, device: torch.device) -> Leaf:
    return to_device(leaf, device) if isinstance(leaf, Tensor) else leaf.to(device, non_blocking=device.type != "cpu")


def concat_nests(nests: Sequence[Nest]) -> Nest:
    """Return the samples of several nests, one nest after another, in the structure of the first.

    Raises:
        ShapesDifferError: Their structures, or the shapes of their samples, differ.

    Example:
        >>> concat_nests([{"a": torch.tensor([1])}, {"a": torch.tensor([2, 3])}])
        {'a': tensor([1, 2, 3])}
    """
    with _structures_compared(nests):
        if isinstance(nests[0], Tensor):
            return torch.cat(list(nests))
        return map_nest(_cat, *nests)


def nest_bytes(nest: Nest) -> int:
    """Return the size of all tensors in bytes.

    Example:
        >>> nest_bytes({"a": torch.zeros(2, dtype=torch.uint8), "b": torch.zeros(2)})
        10
    """
    return sum(leaf.nbytes for leaf in leaves(nest))


def require_same_structure(nest: Nest, other: Nest) -> None:
    """Check that samples of two nests can be stored together.

    Tuples and lists are alike, and the order of keys does not matter.

    Args:
        nest: A nest.
        other: Another one.

    Raises:
        ShapesDifferError: They have other keys, numbers of parts, or shapes of a sample.
    """
    if isinstance(nest, Tensor) and isinstance(other, Tensor):
        _require_same_shape("", nest, other)
        return
    mine, its = dict(named_leaves(nest)), dict(named_leaves(other))
    if mine.keys() != its.keys():
        raise ShapesDifferError(
            f"inputs {_described(nest)} cannot be stored together with inputs {_described(other)}: give all samples "
            "the same parts."
        )
    for name, leaf in mine.items():
        _require_same_shape(name, leaf, its[name])


@contextmanager
def _structures_compared(nests: Sequence[Nest]) -> Iterator[None]:
    """Compare the structures only if something failed: comparing takes time."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError):
        for other in nests[1:]:
            require_same_structure(nests[0], other)
        raise


def _cat(*parts: Leaf) -> Leaf:
    if any(isinstance(part, Ragged) for part in parts):
        return Ragged.cat(parts)
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _require_same_shape(name: str, leaf: Leaf, other: Leaf) -> None:
    ragged = isinstance(leaf, Ragged) or isinstance(other, Ragged)
    if leaf.shape[2:] == other.shape[2:] if ragged else leaf.shape[1:] == other.shape[1:]:
        return
    part = f" ({name!r})" if name else ""
    raise ShapesDifferError(
        f"inputs{part} of shape {tuple(leaf.shape[1:])} cannot be stored together with others of shape "
        f"{tuple(other.shape[1:])}: give all samples one shape (sequences: pad them all to one length, or pass them "
        "without padding and create the learner with padding=steppe.Padding(…))."
    )


def _described(nest: Nest) -> str:
    """The kind of a nest with the names of its parts."""
    if isinstance(nest, Mapping):
        return f"with the keys {', '.join(repr(key) for key in nest)}"
    return f"of {len(nest)} parts" if isinstance(nest, (tuple, list)) else "of one tensor"


def _quoted(name: str) -> str:
    return f"{name!r} " if name else "an input "
