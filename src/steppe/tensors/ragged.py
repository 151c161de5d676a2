"""Sequences of different lengths, each kept without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from steppe.errors import DataError


class Ragged:
    """Samples that are sequences of different lengths: tensors (length, *features) with the same features and type.

    It may stand wherever a tensor of samples may: alone, or in a dictionary or tuple of inputs. The learner needs
    `padding=steppe.Padding(…)` to make batches of it.

    Args:
        rows: The sequences, as tensors.

    Attributes:
        rows: The sequences.

    Raises:
        DataError: They differ in type or features, or one has no length.

    Example:
        >>> words = Ragged([torch.tensor([5, 3, 8]), torch.tensor([7])])
        >>> len(words), words.padded(0).tolist()
        (2, [[5, 3, 8], [7, 0, 0]])
    """

    def __init__(self, rows: Iterable[Tensor]) -> None:
        self.rows = list(rows)
        for place, row in enumerate(self.rows):
            if not isinstance(row, Tensor) or row.ndim == 0:
                kind = "a single number" if isinstance(row, Tensor) else f"of type {type(row).__name__}"
                raise DataError(f"has a sequence that is {kind} (sample {place}); expected a tensor (length, …).")
            first = self.rows[0]
            if row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
                raise DataError(
                    f"has sequences of {first.dtype} with features {tuple(first.shape[1:])} and, in sample {place}, "
                    f"of {row.dtype} with features {tuple(row.shape[1:])}; only their lengths may differ."
                )

    @classmethod
    def _of(cls, rows: list[Tensor]) -> Ragged:
        """From rows that are known to fit together."""
        made = cls.__new__(cls)
        made.rows = rows
        return made

    @classmethod
    def empty_slots(cls, like: Ragged, count: int) -> Ragged:
        """So many sequences of length 0, to be assigned to."""
        empty = like.rows[0][:0].clone() if like.rows else torch.empty(0, device="cpu")
        return cls._of([empty] * count)

    @classmethod
    def cat(cls, parts: Sequence[Ragged | Tensor]) -> Ragged:
        """The sequences of several, one after another; the rows of a tensor are sequences of one length."""
        return cls([row for part in parts for row in (part.rows if isinstance(part, Ragged) else part.unbind())])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | Tensor) -> Ragged:
        return self._of(self.rows[index]) if isinstance(index, slice) else self.pick(_places(index))

    def __setitem__(self, index: slice | Tensor, new: Ragged) -> None:
        places = range(*index.indices(len(self))) if isinstance(index, slice) else _places(index)
        self.put(places, new)

    def __repr__(self) -> str:
        return f"Ragged({len(self)} sequences)"

    def pick(self, places: Iterable[int]) -> Ragged:
        """The sequences at these places."""
        return self._of([self.rows[place] for place in places])

    def put(self, places: Iterable[int], new: Ragged) -> None:
        """Assign copies, which do not keep the rest of their batch in memory."""
        for place, row in zip(places, new.rows, strict=True):
            self.rows[place] = row.clone()

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The number of sequences, None for their lengths, and the features of each element."""
        return (len(self.rows), None, *(self.rows[0].shape[1:] if self.rows else ()))

    @property
    def ndim(self) -> int:
        """How many dimensions the padded tensor has."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.rows[0].dtype if self.rows else torch.float32

    @property
    def device(self) -> torch.device:
        """Where the sequences lie."""
        return self.rows[0].device if self.rows else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """The size of all elements."""
        return sum(row.nbytes for row in self.rows)

    def lengths(self, device: torch.device | None = None) -> Tensor:
        """The length of each sequence, brought to the device without waiting."""
        made = torch.tensor([len(row) for row in self.rows], dtype=torch.int64, device="cpu")
        return made if device is None else made.to(device, non_blocking=True)

    def flat(self) -> Tensor:
        """All elements of all sequences, one after another."""
        return torch.cat(self.rows) if self.rows else torch.empty(0, device="cpu")

    @classmethod
    def from_flat(cls, flat: Tensor, lengths: Tensor) -> Ragged:
        """The inverse of `flat` and `lengths`.

        Args:
            flat: All elements.
            lengths: The length of each sequence.

        Returns:
            The sequences.

        Raises:
            ValueError: The lengths do not fit.
        """
        sizes = lengths.tolist() if lengths.ndim == 1 and lengths.dtype == torch.int64 else [-1]
        if flat.ndim == 0 or min(sizes, default=0) < 0 or sum(sizes) != len(flat):
            raise ValueError(f"the lengths of {len(sizes)} sequences do not fit their elements, {tuple(flat.shape)}")
        return cls._of([row.clone() for row in torch.split(flat, sizes)])

    def to(self, target: Any, *, non_blocking: bool = False, copy: bool = False) -> Ragged:
        """What `tensor.to` does with each sequence, for a device or a type; in one transfer."""
        if not self.rows:
            return self
        flat = self.flat()  # a copy already
        moved = flat.to(target, non_blocking=non_blocking)
        if not copy and moved is flat:
            return self
        return self._of(list(torch.split(moved, [len(row) for row in self.rows])))

    def clone(self) -> Ragged:
        """A copy."""
        return self._of([row.clone() for row in self.rows])

    def detach(self) -> Ragged:
        """The same without autograd's graph."""
        return self._of([row.detach() for row in self.rows])

    def pin_memory(self) -> Ragged:
        """The same in pinned memory, for a `DataLoader` with `pin_memory=True`."""
        return self._of([row.pin_memory() for row in self.rows])

    def padded(self, value: float) -> Tensor:
        """One tensor (samples, longest, *features), filled up with a value at the ends."""
        return pad_sequence(self.rows, batch_first=True, padding_value=value)


def _places(index: Tensor) -> list[int]:
    if index.dtype == torch.bool:
        index = index.nonzero().flatten()
    places: list[int] = index.tolist()
    return places
