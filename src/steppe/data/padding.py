"""Sequences of different lengths: how they are padded to one length, batch by batch, when the model is to see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steppe.errors import DataError, UsageError, short_repr
from steppe.tensors.nest import Nest, named_leaves
from steppe.tensors.ragged import Ragged

NO_PADDING = (
    "has sequences of different lengths; create the learner with padding=steppe.Padding(…), or pad all sequences to "
    "one length."
)


@dataclass(frozen=True)
class Padding:
    """Pads sequences to the longest of each batch. Buffers keep them without padding.

    A sequence is an input with at least one dimension per sample; the first one is its length. Mask and lengths are
    those of the sequences before padding.

    Args:
        value: What to fill up with. A number pads every sequence; a dictionary from names of inputs to numbers only
            those, such as `{"input_ids": 1, "attention_mask": 0}` (an input without a name is `""`).
        mask: Under which name the model gets a mask, True where the samples have elements; None passes none.
        lengths: Under which name the model gets the lengths, as int64; None passes none.
        target: What targets that are sequences are filled up with; cross-entropy ignores -100.

    Raises:
        UsageError: A value is not a number, or a name not a string.

    Example:
        >>> import steppe, torch
        >>> class Tagger(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.table, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 2)
        ...     def forward(self, words, mask):
        ...         words = self.table(words) * mask.unsqueeze(-1)
        ...         return self.head(words.sum(1) / mask.sum(1, keepdim=True))
        >>> padding = steppe.Padding(0, mask="mask")
        >>> learner = steppe.Learner(Tagger(), steppe.ER(), padding=padding)
        >>> texts = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6]), torch.tensor([7, 8])]
        >>> _ = learner.learn(steppe.Task((texts, torch.tensor([0, 1, 0, 1]))))
        >>> learner.predict(texts).shape
        torch.Size([4])
    """

    value: float | Mapping[str, float] = 0
    mask: str | None = None
    lengths: str | None = None
    target: float = -100

    def __post_init__(self) -> None:
        values = list(self.value.values()) if isinstance(self.value, Mapping) else [self.value]
        for value in (*values, self.target):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UsageError(f"padding: expected numbers to fill up with, got {short_repr(value)}.")
        for name in (self.mask, self.lengths, *(self.value if isinstance(self.value, Mapping) else ())):
            if name is not None and not isinstance(name, str):
                raise UsageError(f"padding: expected the name of an argument, got {short_repr(name)}.")
        if self.mask is not None and self.mask == self.lengths:
            raise UsageError(f"padding: mask and lengths are both named {self.mask!r}.")

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        value = dict(self.value) if isinstance(self.value, Mapping) else self.value
        return {"value": value, "mask": self.mask, "lengths": self.lengths, "target": self.target}

    def as_stored(self, x: Nest) -> Nest:
        """Return inputs with each sequence in the form in which buffers keep it, even where all have one length.

        Raises:
            DataError: An input has sequences of different lengths, but no padding value.
        """

        def stored(name: str, leaf: Tensor | Ragged) -> Tensor | Ragged:
            if isinstance(leaf, Ragged):
                self._value_of(name, leaf)
                return leaf
            named = not isinstance(self.value, Mapping) or name in self.value
            return Ragged(leaf.unbind()) if named and leaf.ndim > 1 else leaf

        return _map_named(stored, x)

    def padded(self, x: Nest) -> Nest:
        """Return the model's inputs: tensors of one length, with mask and lengths if they are wanted.

        Args:
            x: Stored inputs.

        Returns:
            A nest like `x`; with mask or lengths a dictionary, whose keys 0, 1, … stand for inputs without a name.

        Raises:
            DataError: Mask and lengths are wanted, but the sequences of a sample differ in length, or an input has
                the name already.
        """
        sequences = {name: leaf for name, leaf in named_leaves(x) if isinstance(leaf, Ragged)}

        def padded(name: str, leaf: Tensor | Ragged) -> Tensor:
            return leaf.padded(self._value_of(name, leaf)) if isinstance(leaf, Ragged) else leaf

        made = _map_named(padded, x)
        if not sequences or (self.mask is None and self.lengths is None):
            return made
        return self._with_lengths(made, sequences)

    def pad_targets(self, y: Tensor | Ragged) -> Tensor:
        """Return targets as a tensor."""
        return y.padded(self.target) if isinstance(y, Ragged) else y

    def _value_of(self, name: str, leaf: Ragged) -> float:
        if not isinstance(self.value, Mapping):
            return self.value
        if name not in self.value:
            raise DataError(f"has sequences of different lengths in {name!r}, for which `padding` has no value.")
        return self.value[name]

    def _with_lengths(self, x: Nest, sequences: Mapping[str, Ragged]) -> Nest:
        (first, one), *others = sequences.items()
        sizes = [len(row) for row in one.rows]
        for name, other in others:
            if [len(row) for row in other.rows] != sizes:
                raise DataError(
                    f"has sequences of different lengths in {first!r} and {name!r} of one sample, so that there is no "
                    "one mask; leave `mask` and `lengths` out of `padding`, and make masks in `input_transform`."
                )
        named = dict(x) if isinstance(x, Mapping) else dict(enumerate(x if isinstance(x, (tuple, list)) else (x,)))
        for wanted in (self.mask, self.lengths):
            if wanted in named:
                raise DataError(f"has the input {wanted!r} already; leave it out of the data or of `padding`.")
        lengths = one.lengths(one.device)
        if self.mask is not None:
            places = torch.arange(max(sizes, default=0), device=one.device)
            named[self.mask] = places < lengths.unsqueeze(1)
        if self.lengths is not None:
            named[self.lengths] = lengths
        return named


def _map_named(function: Any, nest: Nest, name: str = "") -> Nest:
    """`map_nest` with the name of each leaf, as `named_leaves` gives it."""
    if isinstance(nest, Mapping):
        return {key: _map_named(function, nest[key], f"{name}.{key}" if name else str(key)) for key in nest}
    if isinstance(nest, (tuple, list)):
        return tuple(_map_named(function, part, f"{name}[{place}]") for place, part in enumerate(nest))
    return function(name, nest)
