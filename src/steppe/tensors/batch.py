"""A batch: samples, their labels, and the tasks they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steppe.errors import ShapesDifferError
from steppe.tensors.nest import Nest, concat_nests, index_nest, nest_bytes, require_same_structure


def index_of(places: Iterable[int], device: torch.device) -> Tensor:
    """Copy indices to the device without waiting for it."""
    return torch.tensor(list(places), dtype=torch.int64, device="cpu").to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Shares of samples in the loss, one for the first samples of a batch and one for the rest.

    Attributes:
        rows: The share of each sample, (n,).
        split: How many samples are the first ones.
        parts: The weight of the first samples' mean loss, and of the others'.
    """

    rows: Tensor
    split: int
    parts: tuple[float, float]


@dataclass(slots=True, eq=False)
class Batch:
    """Samples with their targets and, for each, the place of its task in the order of learning.

    Attributes:
        x: The inputs: a tensor, or a dictionary or tuple of tensors; `Ragged` where sequences differ in length.
        y: The targets: class numbers, or anything that the loss takes.
        task: The places of the tasks.
    """

    x: Nest
    y: Any
    task: Tensor
    shares: Shares | None = field(default=None, kw_only=True)
    """The samples' shares in the loss, if they are not the same for all. A part of the batch has its own mean loss."""

    @classmethod
    def of_task(cls, x: Nest, y: Any, place: int) -> Batch:
        """Samples of one task."""
        return cls(x, y, torch.full((len(y),), place, dtype=torch.int64, device=y.device))

    def __len__(self) -> int:
        return self.task.shape[0]  # len() of a tensor is slow enough to show in every update

    def __getitem__(self, index: slice | Tensor) -> Batch:
        return Batch(index_nest(self.x, index), self.y[index], self.task[index])

    @property
    def nbytes(self) -> int:
        """The size of all its tensors in bytes."""
        return sum(map(nest_bytes, (self.x, self.y, self.task)))

    @staticmethod
    def union(batches: Sequence[Batch]) -> Batch:
        """The samples of several batches, one batch after another."""
        if len(batches) == 1:
            return batches[0]
        try:
            return Batch(
                _join([batch.x for batch in batches]),
                _join([batch.y for batch in batches]),
                torch.cat([batch.task for batch in batches]),
            )
        except RuntimeError:
            for batch in batches[1:]:
                batches[0].require_like(batch)
            raise

    def require_like(self, other: Batch) -> None:
        """Raise ShapesDifferError if the other batch has samples of another shape."""
        require_same_structure(self.x, other.x)
        if isinstance(self.y, Tensor) and isinstance(other.y, Tensor) and self.y.shape[1:] != other.y.shape[1:]:
            raise ShapesDifferError(
                f"targets of shape {tuple(self.y.shape[1:])} cannot be stored together with others of shape "
                f"{tuple(other.y.shape[1:])}: give all samples targets of one shape."
            )

    def flat(self) -> Batch:
        """The batch with each sample flattened to a row."""
        return self if self.x.ndim == 2 else Batch(self.x.flatten(1), self.y, self.task, shares=self.shares)

    def joined(self, other: Batch | None) -> Batch:
        """The batch followed by the other's samples."""
        return self if other is None or len(other) == 0 else Batch.union([self, other])

    def with_shares(self, shares: Shares) -> Batch:
        """The same with other shares of the samples in the loss."""
        return Batch(self.x, self.y, self.task, shares=shares)


def _join(parts: list[Nest]) -> Nest:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and isinstance(parts[1], Tensor) else concat_nests(parts)
