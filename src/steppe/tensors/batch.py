"""A batch: samples, their labels, and the tasks they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.errors import ShapesDifferError


def index_of(places: Iterable[int], device: torch.device) -> Tensor:
    """Places to index tensors on the device by, brought there without waiting for it."""
    return torch.tensor(list(places), dtype=torch.int64, device="cpu").to(device, non_blocking=True)


@dataclass(slots=True, eq=False)
class Batch:
    """Samples with their labels and, for each, the place of its task in the order of learning."""

    x: Tensor
    y: Tensor
    task: Tensor
    share: Tensor | None = None
    """The share of each sample in the loss, if it is not the same for all."""

    def __len__(self) -> int:
        return self.y.shape[0]  # len() of a tensor takes a detour that shows in every update

    def __getitem__(self, index: slice | Tensor) -> Batch:
        share = None if self.share is None else self.share[index]
        return Batch(self.x[index], self.y[index], self.task[index], share)

    @staticmethod
    def union(batches: Sequence[Batch]) -> Batch:
        """The samples of several batches, one batch after another."""
        if len(batches) == 1:
            return batches[0]
        try:
            return Batch(
                torch.cat([batch.x for batch in batches]),
                torch.cat([batch.y for batch in batches]),
                torch.cat([batch.task for batch in batches]),
            )
        except RuntimeError:
            for batch in batches[1:]:
                batches[0].require_like(batch)
            raise

    def require_like(self, other: Batch) -> None:
        """Refuse to be kept together with samples of another shape."""
        mine, its = self.x.shape[1:], other.x.shape[1:]
        if mine != its:
            raise ShapesDifferError(
                f"inputs of shape {tuple(mine)} cannot be kept together with others of shape {tuple(its)}: give all "
                "samples one shape (pad sequences to one length, not to the longest of each batch)."
            )

    def flat(self) -> Batch:
        """The same with each sample as a row of numbers."""
        return self if self.x.ndim == 2 else Batch(self.x.flatten(1), self.y, self.task, self.share)

    def joined(self, other: Batch | None) -> Batch:
        """The batch followed by the other's samples."""
        return self if other is None or len(other) == 0 else Batch.union([self, other])

    def with_shares(self, share: Tensor) -> Batch:
        """The same with another share of each sample in the loss."""
        return Batch(self.x, self.y, self.task, share)
