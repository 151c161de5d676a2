"""The replay buffer: a reservoir of samples in preallocated tensors of their original type (bytes stay bytes)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.errors import UsageError
from steppe.tensors.batch import Batch, index_of
from steppe.tensors.nest import leaves, map_nest
from steppe.tensors.ragged import Ragged

if TYPE_CHECKING:
    from steppe.runtime.rng import Streams


class Reservoir:
    """A uniform sample of everything ever added (Vitter's algorithm R).

    The n-th sample fills the next slot while there are free ones. After that it goes to slot p, drawn uniformly from
    0..n−1, if p is below the capacity, and is dropped otherwise. Adding and sampling cost the same for any capacity.
    Each sample may carry extras, such as its logits.

    Args:
        capacity: The maximum number of samples.
        draws: The generator for `sample`.
        pushes: The generator for `add`.

    Example:
        >>> import random, torch
        >>> from steppe import Batch
        >>> from steppe.methods.parts.reservoir import Reservoir
        >>> buffer = Reservoir(5, random.Random(0), random.Random(1))
        >>> x, y = torch.randn(20, 3), torch.arange(20)
        >>> buffer.add(Batch(x, y, torch.zeros_like(y)))
        >>> len(buffer), buffer.num_seen
        (5, 20)
        >>> buffer.sample(2).x.shape
        torch.Size([2, 3])
    """

    def __init__(self, capacity: int, draws: random.Random, pushes: random.Random) -> None:
        self.capacity = capacity
        self.num_seen = 0
        self._draws, self._pushes = draws, pushes
        self._stored: Batch | None = None  # allocated for the full capacity by the first `add`
        self._extras: Tensor | None = None  # likewise, if there are extras
        self.has_partial_extras = False
        """Whether extras may be shorter than the newest ones; the rest of them is NaN."""

    @classmethod
    def from_streams(cls, capacity: int, streams: Streams, purpose: str = "replay") -> Reservoir:
        """A reservoir that draws from a run's random streams.

        Args:
            capacity: The maximum number of samples.
            streams: The random streams of the run.
            purpose: The start of the two streams' names; part of their seeds, so never rename it.

        Returns:
            The empty reservoir.
        """
        return cls(capacity, streams.python_rng(f"{purpose} draws"), streams.python_rng(f"{purpose} pushes"))

    def __len__(self) -> int:
        return min(self.num_seen, self.capacity)

    def add(self, batch: Batch, extras: Tensor | None = None) -> None:
        """Offer every sample of a batch, in order.

        Args:
            batch: The samples, as stored.
            extras: One row to keep beside each sample; pass them either always or never.

        Raises:
            ShapesDifferError: If the inputs have another shape than the stored ones.
            UsageError: If there is not enough memory for `capacity` samples.
        """
        if self._stored is None:
            self._extras = None if extras is None else allocate_rows(extras, self.capacity)
            self._stored = allocate_batch(batch, self.capacity)
        batch.require_like(self._stored)  # else a sample of one number would be broadcast over a whole row
        slots: dict[int, int] = {}  # slot -> sample; of several samples for one slot the last stays
        seen = self.num_seen
        for sample in range(len(batch)):
            slot = seen if seen < self.capacity else self._pushes.randrange(seen + 1)
            seen += 1
            if slot < self.capacity:
                slots[slot] = sample
        if slots:
            where, which = (index_of(indices, batch.task.device) for indices in (slots, slots.values()))
            targets = [*_parts(self._stored), *([] if self._extras is None or extras is None else [self._extras])]
            sources = [*_parts(batch), *([] if extras is None else [extras])]
            places = list(slots), list(slots.values())
            rows = [
                part.pick(places[1]) if isinstance(part, Ragged) else part.index_select(0, which) for part in sources
            ]
            try:
                _write(targets, where, places[0], rows)
            except BaseException:  # interrupted halfway: write again, so that no sample keeps another one's label
                _write(targets, where, places[0], rows)
                self.num_seen = seen
                raise
        self.num_seen = seen  # last, so that only complete samples are counted

    def sample(self, count: int) -> Batch | None:
        """Draw distinct samples uniformly.

        Args:
            count: How many; fewer are returned if the buffer holds fewer.

        Returns:
            The samples, or None if nothing was added yet.
        """
        if self._stored is None:
            return None
        return _select(self._stored, *self._sample_places(count))

    def sample_places(self, count: int) -> list[int] | None:
        """Draw distinct samples uniformly, as `sample` does.

        Args:
            count: How many; fewer are drawn if the buffer holds fewer.

        Returns:
            Their places in the buffer, or None if nothing was added yet.
        """
        return None if self._stored is None else self._sample_places(count)[0]

    def at(self, places: Sequence[int]) -> Batch:
        """The samples in some places.

        Args:
            places: The places.

        Returns:
            The samples.

        Raises:
            ValueError: If a place is empty.
        """
        if self._stored is None or any(not 0 <= place < len(self) for place in places):
            raise ValueError(f"the buffer holds {len(self)} samples, but others are named")
        return _select(self._stored, places, index_of(places, self._stored.task.device))

    def sample_with_extras(self, count: int) -> tuple[Batch, Tensor] | None:
        """Draw distinct samples uniformly, with their extras.

        Args:
            count: How many; fewer are returned if the buffer holds fewer.

        Returns:
            The samples and their extras, or None if nothing was added yet, or never with extras.
        """
        if self._stored is None or self._extras is None:
            return None
        places, indices = self._sample_places(count)
        return _select(self._stored, places, indices), self._extras[indices]

    def widen_extras(self, width: int) -> None:
        """Make room for longer extras, (n, width). Those stored so far are completed by NaN.

        Args:
            width: The length of extras from now on.
        """
        if self._extras is None or self._extras.shape[1] == width:
            return
        wider = allocate_rows(self._extras.new_empty((0, width)), self.capacity).fill_(torch.nan)
        wider[:, : self._extras.shape[1]] = self._extras
        self.has_partial_extras, self._extras = True, wider

    def _sample_places(self, count: int) -> tuple[list[int], Tensor]:
        """Distinct places, as numbers and as a tensor on the device."""
        assert self._stored is not None
        filled = min(self.num_seen, self.capacity)
        places = self._draws.sample(range(filled), min(count, filled))
        return places, index_of(places, self._stored.task.device)

    def state_dict(self) -> State:
        """The number of samples seen and the filled slots.

        Returns:
            The state.
        """
        filled = slice(0, len(self))
        stored = None if self._stored is None else self._stored[filled]
        extras = None if self._extras is None else self._extras[filled]
        return {"age": self.num_seen, "stored": stored, "notes": extras, "partial": self.has_partial_extras}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If the number of stored samples does not match the number seen.
        """
        seen, stored, extras = state["age"], state["stored"], state["notes"]
        parts = [] if stored is None else [*_parts(stored), *([] if extras is None else [extras])]
        if type(seen) is not int or seen < 0 or any(len(part) != min(seen, self.capacity) for part in parts):
            raise ValueError(
                f"a buffer of capacity {self.capacity} that has seen {seen} samples cannot hold {[*map(len, parts)]}"
            )
        allocated = None
        if stored is not None:
            allocated = map_batch(lambda part: _with_capacity(part, self.capacity), stored)
        kept = None if extras is None else _rows_with_capacity(extras, self.capacity)
        self.has_partial_extras = bool(state.get("partial", False))  # older states have no such entry
        self.num_seen, self._stored, self._extras = seen, allocated, kept  # last, once everything could be allocated

    def memory_bytes(self) -> int:
        """The allocated memory of the samples, without extras; of sequences, what those stored take.

        Returns:
            Bytes.
        """
        return 0 if self._stored is None else self._stored.nbytes

    def extras_bytes(self) -> int:
        """The allocated memory of the extras.

        Returns:
            Bytes.
        """
        return 0 if self._extras is None else self._extras.nbytes


def allocate_rows(like: Tensor, capacity: int) -> Tensor:
    """An uninitialized tensor of `capacity` rows with the row shape, type and device of `like`."""
    try:
        return torch.empty((capacity, *like.shape[1:]), dtype=like.dtype, device=like.device)
    except RuntimeError as error:  # the text depends on the device's allocator
        raise UsageError(
            f"not enough memory for {capacity:,} samples of shape {tuple(like.shape[1:])}: reduce the replay memory."
        ) from error


def allocate_batch(like: Batch, capacity: int) -> Batch:
    """A batch of `capacity` samples like those of another one; sequences of different lengths are empty slots."""
    return map_batch(
        lambda part: Ragged.empty_slots(part, capacity) if isinstance(part, Ragged) else allocate_rows(part, capacity),
        like,
    )


def map_batch(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """A batch of what a function makes of each tensor."""
    return Batch(map_nest(function, batch.x), function(batch.y), function(batch.task))


def _with_capacity(filled: Tensor | Ragged, capacity: int) -> Tensor | Ragged:
    if isinstance(filled, Ragged):
        slots = Ragged.empty_slots(filled, capacity)
        slots[: len(filled)] = filled
        return slots
    return _rows_with_capacity(filled, capacity)


def _rows_with_capacity(filled: Tensor, capacity: int) -> Tensor:
    whole = allocate_rows(filled, capacity)
    whole[: len(filled)] = filled
    return whole


def _select(batch: Batch, places: Sequence[int], indices: Tensor) -> Batch:
    """The samples at the places; `index_select` has less overhead than general indexing."""
    if isinstance(batch.x, Tensor) and isinstance(batch.y, Tensor):
        return Batch(
            batch.x.index_select(0, indices), batch.y.index_select(0, indices), batch.task.index_select(0, indices)
        )
    return map_batch(
        lambda part: part.pick(places) if isinstance(part, Ragged) else part.index_select(0, indices), batch
    )


def _write(targets: Sequence[Any], where: Tensor, places: Sequence[int], rows: Sequence[Any]) -> None:
    for target, new in zip(targets, rows, strict=True):
        if isinstance(target, Ragged):
            target.put(places, new)
        else:
            target[where] = new


def _parts(batch: Batch) -> list[Any]:
    return [batch.x, batch.y, batch.task] if isinstance(batch.x, Tensor) else [*leaves(batch.x), batch.y, batch.task]
