"""The kind of inputs that a learner is trained on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from steppe.checkpoint.tree import State, parse_dtype
from steppe.errors import DataError
from steppe.network.network import Network
from steppe.tensors.nest import Nest, named_leaves


class InputKind(NamedTuple):
    """The kind of one input: its name, the shape of a sample (None for a length), and its type."""

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype

    @property
    def where(self) -> str:
        """Its name for messages, with a space before it; nothing if there is a single input."""
        return f" {self.name!r}" if self.name else ""


Kind = tuple[InputKind, ...]
"""The kinds of a task's inputs, by name."""


def kind_of(x: Nest) -> Kind:
    """Return the kind of stored inputs."""
    return tuple(
        sorted(InputKind(name, tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in named_leaves(x))
        if isinstance(x, (dict, tuple))
        else [InputKind("", tuple(x.shape[1:]), x.dtype)]
    )


def difference(own: Kind, other: Kind) -> tuple[str, str] | None:
    """Describe how two kinds differ: what the one is, and what the other is; None if they do not."""
    names, others = [part.name for part in own], [part.name for part in other]
    if names != others:
        return _described(own), _described(other)
    for one, its in zip(own, other, strict=True):
        if one != its:
            where = f" in{one.where}" if one.name else ""
            return f"{one.dtype} of shape {one.shape}{where}", f"{its.dtype} of shape {its.shape}"
    return None


def shapes(kind: Kind) -> str:
    """The shapes of a sample, for messages."""
    if len(kind) == 1 and not kind[0].name:
        return str(kind[0].shape)
    return ", ".join(f"{part.shape}{part.where}" for part in kind)


def _described(kind: Kind) -> str:
    if [part.name for part in kind] == [""]:
        return "a single tensor"
    return f"the parts {', '.join(repr(part.name) for part in kind)}"


def check_scaled_alike(x: Nest, kind: Kind, network: Network) -> None:
    """Raise DataError if only one of the inputs and the kind trained on is bytes, and bytes are scaled by default."""
    if not network.inputs.scales_bytes:
        return
    for own, trained in zip(kind_of(x), kind, strict=False):
        if (own.dtype == torch.uint8) != (trained.dtype == torch.uint8):
            raise DataError(
                f"are {own.dtype}, but the model was trained on {trained.dtype}, and only bytes are scaled to 0…1; "
                "use the same type."
            )


def kind_to_state(kind: Kind | None) -> State:
    """A kind as plain values."""
    if kind is None:
        return None
    parts = [[list(part.shape), str(part.dtype).removeprefix("torch.")] for part in kind]
    if [part.name for part in kind] == [""]:
        return parts[0]
    return {part.name: values for part, values in zip(kind, parts, strict=True)}


def kind_from_state(state: State) -> Kind | None:
    """The inverse of `kind_to_state`; ValueError for anything else."""
    if state is None:
        return None
    parts = state if isinstance(state, dict) else {"": state}
    return tuple(InputKind(name, tuple(shape), parse_dtype(dtype)) for name, (shape, dtype) in parts.items())
