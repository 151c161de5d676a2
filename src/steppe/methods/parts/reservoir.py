"""Replay: a reservoir of samples in preallocated tensors, kept in the form the data came in (bytes stay bytes)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.errors import UsageError
from steppe.tensors.batch import Batch, index_of


class Reservoir:
    """A uniform sample of everything ever pushed (Vitter's algorithm R).

    The n-th sample pushed is appended while there is room; afterwards it takes slot p, uniform in 0..n−1, if that slot
    exists. Draws and pushes cost the same however large the buffer is. Beside each sample a note may be kept, such as
    the logits it had.
    """

    def __init__(self, capacity: int, draws: random.Random, pushes: random.Random) -> None:
        self.capacity = capacity
        self.num_seen = 0
        self._draws, self._pushes = draws, pushes
        self._stored: Batch | None = None  # preallocated to the capacity at the first push
        self._notes: Tensor | None = None  # likewise, where there are any

    def __len__(self) -> int:
        return min(self.num_seen, self.capacity)

    def add(self, batch: Batch, notes: Tensor | None = None) -> None:
        """Offer every sample of the batch, in order, each with its row of the notes."""
        if self._stored is None:
            self._notes = None if notes is None else allocate_rows(notes, self.capacity)
            self._stored = Batch(*(allocate_rows(part, self.capacity) for part in (batch.x, batch.y, batch.task)))
        batch.require_like(self._stored)  # else a sample of one number would fill a whole row
        slots: dict[int, int] = {}  # slot -> sample; of several samples for one slot the last stays
        age = self.num_seen
        for sample in range(len(batch)):
            slot = age if age < self.capacity else self._pushes.randrange(age + 1)
            age += 1
            if slot < self.capacity:
                slots[slot] = sample
        if slots:
            where, which = (index_of(places, batch.y.device) for places in (slots, slots.values()))
            places = [*_parts(self._stored), *([] if self._notes is None or notes is None else [self._notes])]
            rows = [part[which] for part in (*_parts(batch), *([] if notes is None else [notes]))]
            try:
                _write(places, where, rows)
            except BaseException:  # split by an interrupt: a sample must not stand with another one's label
                _write(places, where, rows)
                self.num_seen = age
                raise
        self.num_seen = age  # at last: what is counted is there

    def sample(self, count: int) -> Batch | None:
        """Up to `count` distinct samples, uniformly; None from an empty buffer."""
        if self._stored is None:
            return None
        return _select(self._stored, self._sample_indices(count))

    def sample_with_extras(self, count: int) -> tuple[Batch, Tensor] | None:
        """The same, with the notes of the samples drawn."""
        if self._stored is None or self._notes is None:
            return None
        picked = self._sample_indices(count)
        return _select(self._stored, picked), self._notes[picked]

    def _sample_indices(self, count: int) -> Tensor:
        assert self._stored is not None
        held = min(self.num_seen, self.capacity)
        return index_of(self._draws.sample(range(held), min(count, held)), self._stored.y.device)

    def state_dict(self) -> State:
        """Age and content, without the room that is not filled yet."""
        filled = slice(0, len(self))
        stored = None if self._stored is None else self._stored[filled]
        return {"age": self.num_seen, "stored": stored, "notes": None if self._notes is None else self._notes[filled]}

    def load_state_dict(self, state: State) -> None:
        """The same age and content again."""
        age, stored, notes = state["age"], state["stored"], state["notes"]
        held = [] if stored is None else [*_parts(stored), *([] if notes is None else [notes])]
        if type(age) is not int or age < 0 or any(len(part) != min(age, self.capacity) for part in held):
            raise ValueError(f"a buffer that was offered {age} samples cannot hold what is said to be in it")
        roomy = None if stored is None else Batch(*(_with_capacity(part, self.capacity) for part in _parts(stored)))
        self._notes = None if notes is None else _with_capacity(notes, self.capacity)
        self.num_seen, self._stored = age, roomy  # once there was memory for all of it

    def memory_bytes(self) -> int:
        """Memory of the samples as allocated, without their notes."""
        return 0 if self._stored is None else sum(part.nbytes for part in _parts(self._stored))

    def extras_bytes(self) -> int:
        """Memory of the notes as allocated."""
        return 0 if self._notes is None else self._notes.nbytes


def allocate_rows(like: Tensor, capacity: int) -> Tensor:
    """An empty tensor for so many rows of the kind."""
    try:
        return torch.empty((capacity, *like.shape[1:]), dtype=like.dtype, device=like.device)
    except RuntimeError as error:  # whatever the device's allocator says
        raise UsageError(
            f"there is no memory for {capacity:,} samples of shape {tuple(like.shape[1:])}: keep fewer for replay."
        ) from error


def _with_capacity(filled: Tensor, capacity: int) -> Tensor:
    """Some rows with room behind them for so many in all."""
    whole = allocate_rows(filled, capacity)
    whole[: len(filled)] = filled
    return whole


def _select(batch: Batch, places: Tensor) -> Batch:
    """Some samples; `index_select` has less to consider than general indexing."""
    return Batch(batch.x.index_select(0, places), batch.y.index_select(0, places), batch.task.index_select(0, places))


def _write(places: Sequence[Tensor], where: Tensor, rows: Sequence[Tensor]) -> None:
    for place, new in zip(places, rows, strict=True):
        place[where] = new


def _parts(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.x, batch.y, batch.task
