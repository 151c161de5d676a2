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

from steppe.errors import short_repr
from steppe.tensors.batch import Batch

_MAX_EMPTY_SIZE = 10_000_000  # what the sides of an empty tensor may multiply to: room is made by them
_MAX_RANGE = 1_000_000  # what a range may span: somebody may make a list of it

State = Any
"""A tree: None, bool, int, float, str, Tensor, Batch, range, lists and dictionaries of them; keys are str or int."""

INVALID_STATE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError)
"""What `load_state_dict` stumbles over where a state, though whole, is not one of the thing that is to become it."""


@runtime_checkable
class Stateful(Protocol):
    """Something whose state can be taken and given back."""

    def state_dict(self) -> State:
        """What it is now; the tensors are its own, not copies."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Become what it was."""
        ...


def clone_tree(tree: State, device: torch.device | str) -> State:
    """The same tree with tensors of its own, on the device."""
    if isinstance(tree, Tensor):
        return tree.detach().to(device, copy=True)
    if isinstance(tree, Batch):
        return Batch(*(clone_tree(part, device) for part in (tree.x, tree.y, tree.task)))
    if isinstance(tree, (list, tuple)):
        return [clone_tree(item, device) for item in tree]
    if isinstance(tree, Mapping):
        return {key: clone_tree(value, device) for key, value in tree.items()}
    return tree


def flatten_tree(tree: State) -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON, with its tensors beside it, each by the way that leads to it."""
    tensors: dict[str, Tensor] = {}

    def named(tensor: Tensor, way: tuple[str, ...]) -> str:
        name = "/".join(way) or "value"
        while name in tensors:  # a key may hold a slash
            name += "'"
        tensors[name] = tensor
        return name

    def pack(node: State, *way: str) -> Any:
        if node is None or isinstance(node, (bool, int, str)):
            return node
        if isinstance(node, float):
            return node if math.isfinite(node) else {"float": str(node)}
        if isinstance(node, Tensor):
            return {"tensor": named(node, way)}
        if isinstance(node, Batch):
            return {"batch": [named(getattr(node, part), (*way, part)) for part in ("x", "y", "task")]}
        if isinstance(node, range):
            return {"range": [node.start, node.stop]}
        if isinstance(node, (list, tuple)):
            return [pack(item, *way, str(place)) for place, item in enumerate(node)]
        if isinstance(node, Mapping):
            return {"items": [[_check_key(key), pack(value, *way, str(key))] for key, value in node.items()]}
        raise TypeError(f"a {type(node).__name__} cannot be kept in a state")

    return pack(tree), tensors


def _check_key(key: object) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise TypeError(f"a {type(key).__name__} cannot be a key in a state")


def unflatten_tree(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> State:
    """The tree again, its tensors as new ones on the device. Whatever is not such a tree raises ValueError."""
    taken: set[str] = set()

    def tensor(name: object) -> Tensor:
        if not isinstance(name, str) or name not in tensors or name in taken:  # twice: memory without end
            raise ValueError(f"there is no tensor {short_repr(name)}, or it is named twice")
        taken.add(name)
        if math.prod(side for side in tensors[name].shape if side) > max(_MAX_EMPTY_SIZE, tensors[name].numel()):
            raise ValueError(f"the tensor {short_repr(name)} is empty, and yet of an enormous shape")
        return tensors[name].to(device, copy=True)  # memory of its own, aligned as every other tensor's

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
            if kind == "range" and isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value):
                if not value[0] <= value[1] <= value[0] + _MAX_RANGE:
                    raise ValueError(f"a range from {short_repr(value[0])} to {short_repr(value[1])} cannot be")
                return range(*value)
            if kind == "items" and isinstance(value, list):
                return dict(_unpack_item(pair, unpack) for pair in value)
        raise ValueError("it holds something that no state holds")

    return unpack(tree)


def _unpack_item(pair: Any, unpack: Any) -> tuple[str | int, State]:
    if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)):
        raise ValueError("it holds something that no state holds")
    return pair[0], unpack(pair[1])


def parse_dtype(name: str) -> torch.dtype:
    """The type of numbers that a state names."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of numbers")
    return found


def as_names(names: State) -> list[str] | None:
    """Names of layers or weights, or None where an older state does not say."""
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return names
    raise ValueError("there is something else than names of layers or weights")
