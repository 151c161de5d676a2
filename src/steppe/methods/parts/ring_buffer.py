"""Ring buffers: each task's most recent samples, in slots of their own (GEM and A-GEM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.methods.parts.reservoir import allocate_batch
from steppe.tensors.batch import Batch
from steppe.tensors.nest import map_nest


class TaskRingBuffer:
    """A fixed number of samples, divided equally into one ring buffer per task.

    A batch is written from the current position up to the end of the ring; the rest of the batch is dropped. A position
    at the end wraps around, and carries over to the next task. Each ring therefore holds the most recent samples of its
    task; slots that a short task never reached stay empty.

    Args:
        memory: The number of samples in all rings together.
        tasks: The number of rings.

    Example:
        >>> import torch
        >>> from steppe import Batch
        >>> from steppe.methods.parts.ring_buffer import TaskRingBuffer
        >>> rings = TaskRingBuffer(memory=6, tasks=2)
        >>> for task in range(2):
        ...     rings.begin_task()
        ...     for start in range(0, 8, 2):
        ...         y = torch.arange(start, start + 2)
        ...         rings.add(Batch(y.float().unsqueeze(1), y, torch.full_like(y, task)))
        >>> [batch.y.tolist() for batch in rings.past()]  # a ring has three slots: 3 and 7 were dropped
        [[4, 5, 6]]
    """

    def __init__(self, memory: int, tasks: int) -> None:
        self.slots = memory // tasks
        self._current = -1
        self._position = 0
        self._stored: Batch | None = None  # allocated by the first `add`; one ring after another
        self._written = torch.zeros(tasks * self.slots, dtype=torch.bool, device="cpu")

    def begin_task(self) -> None:
        """Switch to the next task's ring."""
        self._current += 1

    def add(self, batch: Batch) -> None:
        """Store a batch of the current task.

        Args:
            batch: The samples, as stored.

        Raises:
            ShapesDifferError: If the inputs have another shape than the stored ones.
        """
        if self._stored is None:
            self._stored = allocate_batch(batch, len(self._written))
        batch.require_like(self._stored)  # else a sample of one number would be broadcast over a whole row
        count = min(len(batch), self.slots - self._position)
        start = self._current * self.slots + self._position
        into = slice(start, start + count)
        try:
            self._put(into, batch[:count])
        except BaseException:  # interrupted halfway: write again, so that no sample keeps another one's label
            self._put(into, batch[:count])
            raise
        self._position = (self._position + count) % self.slots

    def _put(self, into: slice, batch: Batch) -> None:
        assert self._stored is not None
        _assign(self._stored, into, batch)
        self._written[into] = True  # last, so that only complete samples count

    def past(self) -> list[Batch]:
        """The stored samples of the tasks before the current one.

        Returns:
            One batch per task, in slot order; tasks without samples are skipped.
        """
        if self._stored is None:
            return []
        rings = (range(task * self.slots, (task + 1) * self.slots) for task in range(self._current))
        held = (self._stored[torch.tensor(ring, device="cpu")[self._written[ring.start : ring.stop]]] for ring in rings)
        return [batch for batch in held if len(batch)]

    def state_dict(self) -> State:
        """The stored samples and the position.

        Returns:
            The state.
        """
        held = None if self._stored is None else self._stored[self._written.nonzero().flatten()]
        return {"task": self._current, "position": self._position, "written": self._written, "held": held}

    def load_state_dict(self, state: State) -> None:
        """Restore a state.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If it belongs to rings of another size or number.
        """
        if state["written"].dtype != torch.bool or state["written"].shape != self._written.shape:
            raise ValueError(
                f"expected {len(self._written)} slots, got {tuple(state['written'].shape)}: memory or tasks differ"
            )
        self._current, self._position, self._written = state["task"], state["position"], state["written"].cpu()
        self._stored = None
        if state["held"] is not None:
            self._stored = allocate_batch(state["held"], len(self._written))
            _assign(self._stored, self._written, state["held"])

    def memory_bytes(self) -> int:
        """The allocated memory of all rings.

        Returns:
            Bytes.
        """
        return 0 if self._stored is None else self._stored.nbytes


def _assign(whole: Batch, places: slice | Tensor, batch: Batch) -> None:
    """Overwrite the samples at these places."""

    def assign(target: Any, source: Any) -> None:
        target[places] = source

    map_nest(assign, whole.x, batch.x)
    assign(whole.y, batch.y)
    assign(whole.task, batch.task)
