"""A replay buffer for any nest of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.checkpoint.tree import INVALID_STATE_ERRORS, State
from steppe.errors import DataError, UsageError, short_repr
from steppe.methods.parts.reservoir import allocate_rows
from steppe.runtime.rng import Streams
from steppe.tensors.batch import index_of
from steppe.tensors.nest import (
    Nest,
    concat_nests,
    index_nest,
    map_nest,
    nest_bytes,
    nest_length,
    require_same_structure,
)


class ReservoirBuffer:
    """A uniform sample of everything ever added: tensors, or dictionaries and tuples of them.

    It draws from its own generators, never from torch's global ones. With the same seed, it makes the same draws as a
    `Learner`'s buffer.

    Args:
        capacity: The maximum number of samples.
        seed: Decides what is kept and drawn.
        device: Where to keep the samples; by default where the first batch is.

    Attributes:
        capacity: The maximum number of samples.
        num_seen: How many samples were added, kept or not.

    Raises:
        UsageError: An argument is invalid.

    Example:
        >>> import steppe, torch
        >>> buffer = steppe.ReservoirBuffer(100, seed=0)
        >>> for _ in range(30):
        ...     buffer.add({"input_ids": torch.randint(9, (10, 4)), "labels": torch.randint(2, (10,))})
        >>> len(buffer), buffer.num_seen
        (100, 300)
        >>> buffer.sample(5)["input_ids"].shape
        torch.Size([5, 4])
    """

    def __init__(self, capacity: int, seed: int = 0, device: str | torch.device | None = None) -> None:
        if type(capacity) is not int or capacity < 1:
            raise UsageError(f"capacity = {short_repr(capacity)} is invalid; it must be at least 1.")
        if type(seed) is not int:
            raise UsageError(f"seed = {short_repr(seed)} is not an int.")
        self.capacity, self.num_seen = capacity, 0
        self._streams = Streams(seed)
        self._draws, self._pushes = (self._streams.python_rng(f"replay {name}") for name in ("draws", "pushes"))
        self._device = device
        self._stored: Nest | None = None

    def __len__(self) -> int:
        return min(self.num_seen, self.capacity)

    def add(self, batch: Nest) -> None:
        """Offer every sample of a batch, in order.

        Args:
            batch: A tensor, or a dictionary, tuple or list of tensors, with the samples along the first dimension.

        Raises:
            DataError: The tensors disagree in length, or the samples in shape with those stored.
        """
        count = _length(batch)
        if self._stored is None:
            self._stored = map_nest(self._allocate, batch)
        require_same_structure(batch, self._stored)
        slots: dict[int, int] = {}
        seen = self.num_seen
        for sample in range(count):
            slot = seen if seen < self.capacity else self._pushes.randrange(seen + 1)
            seen += 1
            if slot < self.capacity:
                slots[slot] = sample

        def write(target: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            where, which = index_of(slots, target.device), index_of(slots.values(), new.device)
            target[where] = new.detach()[which].to(target.device)
            return target

        map_nest(write, self._stored, batch)
        self.num_seen = seen

    def sample(self, count: int) -> Nest | None:
        """Draw distinct samples uniformly.

        Args:
            count: How many; fewer are returned if the buffer holds fewer.

        Returns:
            The samples, in the structure of the first batch; None if nothing was added yet.
        """
        if self._stored is None:
            return None
        indices = self._draws.sample(range(len(self)), min(count, len(self)))
        return map_nest(lambda leaf: leaf.index_select(0, index_of(indices, leaf.device)), self._stored)

    def join(self, batch: Nest, count: int) -> Nest:
        """A batch followed by stored samples.

        Args:
            batch: The batch.
            count: How many stored samples to draw; fewer are drawn if the buffer holds fewer.

        Returns:
            Their union, on the devices of the batch.
        """
        drawn = self.sample(count)
        if drawn is None:
            return batch
        return concat_nests([batch, map_nest(lambda new, own: own.to(new.device), batch, drawn)])

    def memory_bytes(self) -> int:
        """The allocated memory of the samples.

        Returns:
            Bytes.
        """
        return 0 if self._stored is None else nest_bytes(self._stored)

    def state_dict(self) -> State:
        """The stored samples, the number seen, and the state of the generators.

        Returns:
            The state.
        """
        stored = None if self._stored is None else index_nest(self._stored, slice(0, len(self)))
        return {"seen": self.num_seen, "stored": stored, "streams": self._streams.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict` of a buffer of the same capacity.

        Raises:
            UsageError: It is a state of something else, or of a buffer of another capacity.
        """
        try:
            seen, stored, streams = state["seen"], state["stored"], state["streams"]
            held = 0 if stored is None else nest_length(stored)
            if type(seen) is not int or seen < 0 or held != min(seen, self.capacity):
                raise UsageError(
                    f"expected the state of a buffer of capacity {self.capacity}, got {held} samples of {seen} seen; "
                    "create the buffer with the same capacity."
                )
            allocated = None if stored is None else map_nest(self._with_capacity, stored)
            self._streams.load_state_dict(streams)
        except (DataError, *INVALID_STATE_ERRORS) as error:
            raise UsageError(f"this is not the state of a buffer ({type(error).__name__}: {error}).") from error
        self.num_seen, self._stored = seen, allocated

    def _with_capacity(self, filled: Tensor) -> Tensor:
        whole = self._allocate(filled)
        whole[: len(filled)] = filled
        return whole

    def _allocate(self, like: Tensor) -> Tensor:
        return allocate_rows(like[:0] if self._device is None else like[:0].to(self._device), self.capacity)


def _length(batch: Nest) -> int:
    try:
        return nest_length(batch)
    except DataError as error:
        raise DataError(f"the batch {error}") from None
