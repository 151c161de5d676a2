"""A source of labelled samples, read in batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from steppe.data.collate import Pair
from steppe.errors import DataError


class Samples(ABC):
    """Labelled samples that are read in batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def count(self) -> int | None:
        """The number of samples; None for a stream that does not know it."""
        return len(self)

    @abstractmethod
    def take(self, indices: Tensor) -> Pair:
        """The samples with these indices."""

    def require_indexable(self) -> None:  # noqa: B027 - most are
        """DataError if samples cannot be taken by their indices."""

    def batches(self, size: int, order: torch.Generator | None, skip: int = 0) -> Iterator[Pair]:
        """Iterate over all samples once.

        Args:
            size: Samples per batch; the last batch may be smaller.
            order: Shuffles the samples as soon as this is called; None keeps their order.
            skip: How many batches to leave out at the beginning.

        Returns:
            An iterator over the batches.
        """
        count = len(self)
        indices = (
            torch.arange(count, device="cpu") if order is None else torch.randperm(count, generator=order, device="cpu")
        )
        return (self.take(pick) for pick in torch.split(indices, size)[skip:])

    def first(self, count: int = 1) -> Pair:
        """The first samples, at most `count`, to find out shapes; draws from no random number generator."""
        if self.count == 0:
            raise DataError("is empty.")
        return next(self.batches(count, None))

    def count_batches(self, size: int) -> int | None:
        """The number of batches of one pass; None if it is not known."""
        return -(-len(self) // size)

    def digest(self) -> str | None:
        """A hash that identifies the data, or None if it would take a pass through them."""
        return None
