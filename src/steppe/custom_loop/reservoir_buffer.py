"""A replay buffer for any nest of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.checkpoint.tree import INVALID_STATE_ERRORS, State
from steppe.errors import DataError, ShapesDifferError, UsageError, short_repr
from steppe.methods.parts.reservoir import Reservoir
from steppe.runtime.rng import Streams
from steppe.tensors.batch import Batch
from steppe.tensors.nest import Nest, concat_nests, map_nest, nest_device, nest_length, nest_to_device
from steppe.tensors.ragged import Ragged


class ReservoirBuffer:
    """A uniform sample of everything ever added: tensors, or dictionaries and tuples of them.

    It draws from its own generators, never from torch's global ones. With the same seed, it makes the same draws as a
    `Learner`'s buffer.

    Args:
        capacity: The maximum number of samples.
        seed: Decides what is kept and drawn.
        device: Where to keep the samples; by default where the first batch is.

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
        self._streams = Streams(seed)
        self._device = None if device is None else torch.device(device)
        self._reservoir = Reservoir.from_streams(capacity, self._streams)

    @property
    def capacity(self) -> int:
        """The maximum number of samples."""
        return self._reservoir.capacity

    @property
    def num_seen(self) -> int:
        """How many samples were added, kept or not."""
        return self._reservoir.num_seen

    def __len__(self) -> int:
        return len(self._reservoir)

    def add(self, batch: Nest) -> None:
        """Offer every sample of a batch, in order.

        Args:
            batch: A tensor, or a dictionary, tuple or list of tensors, with the samples along the first dimension.

        Raises:
            DataError: The tensors disagree in length.
            ShapesDifferError: The samples have other shapes than those stored.
        """
        kept = map_nest(_detached, batch)
        if self._device is not None:
            kept = nest_to_device(kept, self._device)
        try:
            self._reservoir.add(_without_targets(kept))
        except ShapesDifferError as error:
            raise ShapesDifferError(
                f"{str(error).partition(':')[0]}: pad sequences to one length, or pass them as steppe.Ragged."
            ) from error

    def sample(self, count: int) -> Nest | None:
        """Draw distinct samples uniformly.

        Args:
            count: How many; fewer are returned if the buffer holds fewer.

        Returns:
            The samples, in the structure of the first batch; None if nothing was added yet.
        """
        drawn = self._reservoir.sample(count)
        return None if drawn is None else drawn.x

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
        return concat_nests([batch, nest_to_device(drawn, nest_device(batch))])

    def memory_bytes(self) -> int:
        """The allocated memory of the samples.

        Returns:
            Bytes.
        """
        return self._reservoir.memory_bytes()

    def state_dict(self) -> State:
        """The stored samples, the number seen, and the state of the generators.

        Returns:
            The state.
        """
        state = self._reservoir.state_dict()
        stored = None if state["stored"] is None else state["stored"].x
        return {"seen": state["age"], "stored": stored, "streams": self._streams.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict` of a buffer of the same capacity.

        Raises:
            UsageError: It is a state of something else, or of a buffer of another capacity.
        """
        before = self._streams.state_dict()
        try:
            seen, stored = state["seen"], state["stored"]
            if stored is not None:
                stored = _without_targets(stored if self._device is None else nest_to_device(stored, self._device))
            self._streams.load_state_dict(state["streams"])
            self._reservoir.load_state_dict({"age": seen, "stored": stored, "notes": None})
        except (DataError, *INVALID_STATE_ERRORS) as error:
            self._streams.load_state_dict(before)
            raise UsageError(
                f"this is not the state of a buffer of capacity {self.capacity} ({type(error).__name__}: {error}); "
                "create the buffer with the same capacity."
            ) from error


def _without_targets(samples: Nest) -> Batch:
    """Samples as the reservoir takes them; targets are among them."""
    try:
        count, device = nest_length(samples), nest_device(samples)
    except DataError as error:
        raise DataError(f"the batch {error}") from None
    nothing = torch.empty((count, 0), device=device)
    return Batch(samples, nothing, nothing)


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, (Tensor, Ragged)) else leaf
