"""State trees: what has to be saved in order to resume, as plain values (lists, dictionaries, numbers, strings,
tensors, batches).

Parts with such a state have `state_dict` and `load_state_dict`. `flatten_tree` turns a tree into JSON and named
tensors, and `unflatten_tree` turns these back into a tree of the same kinds of values and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from steppe.errors import DataError, short_repr
from steppe.tensors.batch import Batch
from steppe.tensors.nest import nest_length
from steppe.tensors.ragged import Ragged

_MAX_EMPTY_SIZE = 10_000_000  # product of the nonzero sizes of an empty tensor: torch allocates by them
_MAX_RANGE = 1_000_000  # a caller may turn a range into a list

State = Any
"""A tree: None, bool, int, float, str, Tensor, Ragged, Batch, range, lists and dictionaries of them; keys are str or
int."""

INVALID_STATE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError)
"""What `load_state_dict` may raise for a well-formed state of something else."""


@runtime_checkable
class Stateful(Protocol):
    """Has a state that can be saved and restored."""

    def state_dict(self) -> State:
        """The current state; tensors are not copied."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore a state."""
        ...


def clone_tree(tree: State, device: torch.device | str) -> State:
    """A copy of the tree, its tensors copied to the device."""
    if isinstance(tree, (Tensor, Ragged)):
        return tree.detach().to(device, copy=True)
    if isinstance(tree, Batch):
        return Batch(
            _as_tuples(clone_tree(tree.x, device)), *(clone_tree(part, device) for part in (tree.y, tree.task))
        )
    if isinstance(tree, (list, tuple)):
        return [clone_tree(item, device) for item in tree]
    if isinstance(tree, Mapping):
        return {key: clone_tree(value, device) for key, value in tree.items()}
    return tree


def equal_trees(one: State, other: State) -> bool:
    """Whether two trees hold the same values, tensors to the bit.

    Args:
        one: A tree.
        other: Another one.

    Returns:
        True if they do.

    Example:
        >>> equal_trees({"w": [torch.ones(2), 1]}, {"w": [torch.ones(2), 1]})
        True
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Batch) and isinstance(other, Batch):
        return all(map(equal_trees, (one.x, one.y, one.task), (other.x, other.y, other.task)))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_trees(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    return type(one) is type(other) and bool(one == other)


def flatten_tree(tree: State) -> tuple[Any, dict[str, Tensor]]:
    """Split a tree into JSON and tensors, named by their path in the tree.

    Args:
        tree: The tree.

    Returns:
        The JSON value, and the tensors by name.

    Raises:
        TypeError: It contains a value or key of an unsupported type.

    Example:
        >>> flatten_tree({"step": 3, "w": torch.tensor([1.0])})
        ({'items': [['step', 3], ['w', {'tensor': 'w'}]]}, {'w': tensor([1.])})
    """
    tensors: dict[str, Tensor] = {}

    def add(tensor: Tensor, keys: tuple[str, ...]) -> str:
        name = "/".join(keys) or "value"
        while name in tensors:  # a key may contain a slash
            name += "'"
        tensors[name] = tensor
        return name

    def pack(node: State, *keys: str) -> Any:
        if node is None or isinstance(node, (bool, int, str)):
            return node
        if isinstance(node, float):
            return node if math.isfinite(node) else {"float": str(node)}
        if isinstance(node, Tensor):
            return {"tensor": add(node, keys)}
        if isinstance(node, Batch):
            parts = {part: getattr(node, part) for part in ("x", "y", "task")}
            if all(isinstance(part, Tensor) for part in parts.values()):
                return {"batch": [add(value, (*keys, part)) for part, value in parts.items()]}
            return {"nest": [pack(value, *keys, part) for part, value in parts.items()]}
        if isinstance(node, Ragged):
            return {"ragged": [add(node.flat(), (*keys, "flat")), add(node.lengths(), (*keys, "lengths"))]}
        if isinstance(node, range):
            return {"range": [node.start, node.stop]}
        if isinstance(node, (list, tuple)):
            return [pack(item, *keys, str(place)) for place, item in enumerate(node)]
        if isinstance(node, Mapping):
            return {"items": [[_check_key(key), pack(value, *keys, str(key))] for key, value in node.items()]}
        raise TypeError(f"a state cannot contain a {type(node).__name__}")

    return pack(tree), tensors


def _check_key(key: object) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise TypeError(f"a key in a state cannot be a {type(key).__name__}")


def unflatten_tree(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> State:
    """Rebuild a tree from the results of `flatten_tree`.

    Args:
        tree: The JSON value.
        tensors: The tensors by name.
        device: Where to put the tensors.

    Returns:
        The tree, with copies of the tensors.

    Raises:
        ValueError: `flatten_tree` cannot have returned these.
    """
    taken: set[str] = set()

    def tensor(name: object) -> Tensor:
        if not isinstance(name, str) or name not in tensors or name in taken:  # twice: could fill the memory
            raise ValueError(f"tensor {short_repr(name)} is missing or used twice")
        taken.add(name)
        if math.prod(side for side in tensors[name].shape if side) > max(_MAX_EMPTY_SIZE, tensors[name].numel()):
            raise ValueError(f"tensor {short_repr(name)} is empty but has an enormous shape")
        return tensors[name].to(device, copy=True)  # newly allocated, so aligned like any other tensor

    def unpack(node: Any) -> State:
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if isinstance(node, list):
            return [unpack(item) for item in node]
        if isinstance(node, dict) and len(node) == 1:
            ((kind, value),) = node.items()
            if kind == "tensor":
                return tensor(value)
            if kind == "float" and value in ("inf", "-inf", "nan"):
                return float(value)
            if kind == "batch" and isinstance(value, list) and len(value) == 3:
                return Batch(*(tensor(name) for name in value))
            if kind == "nest" and isinstance(value, list) and len(value) == 3:
                return _unpack_nest(*(unpack(part) for part in value))
            if kind == "ragged" and isinstance(value, list) and len(value) == 2:
                return Ragged.from_flat(tensor(value[0]), tensor(value[1]))
            if kind == "range" and isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value):
                if not value[0] <= value[1] <= value[0] + _MAX_RANGE:
                    raise ValueError(f"invalid range from {short_repr(value[0])} to {short_repr(value[1])}")
                return range(*value)
            if kind == "items" and isinstance(value, list):
                return dict(_unpack_item(pair, unpack) for pair in value)
        raise ValueError("it contains something that no state contains")

    return unpack(tree)


def _unpack_nest(x: State, y: State, task: State) -> Batch:
    """A batch whose inputs are a nest; ValueError if its parts do not fit together."""
    if not (isinstance(task, Tensor) and isinstance(y, (Tensor, Ragged)) and len(y) == len(task)):
        raise ValueError("a batch has other parts than samples, targets and tasks")
    try:
        fits = nest_length(x) == len(task)
    except DataError as error:
        raise ValueError(f"a batch {error}") from error
    if not fits:
        raise ValueError("a batch has more or fewer inputs than tasks")
    return Batch(_as_tuples(x), y, task)


def _as_tuples(nest: State) -> State:
    """A nest whose lists, which is what a tree makes of tuples, are tuples again."""
    if isinstance(nest, (list, tuple)):
        return tuple(_as_tuples(part) for part in nest)
    return {key: _as_tuples(part) for key, part in nest.items()} if isinstance(nest, dict) else nest


def _unpack_item(pair: Any, unpack: Any) -> tuple[str | int, State]:
    if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)):
        raise ValueError("it contains something that no state contains")
    return pair[0], unpack(pair[1])


def parse_dtype(name: str) -> torch.dtype:
    """The dtype that a state names; ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def as_names(names: State) -> list[str] | None:
    """Check names of layers or weights from a state; None in older states."""
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return names
    raise ValueError("expected names of layers or weights")
