"""Ring memories: for every task the last samples it showed, in slots of its own (GEM and A-GEM)."""

from __future__ import annotations

import torch

from steppe.errors import UsageError
from steppe.replay import room
from steppe.state import State
from steppe.task import Task
from steppe.types import Batch


class Rings:
    """A memory cut into equal rings, one per task.

    A batch is written from the present position on, as far as the ring's end, and what does not fit is dropped; a
    position at the end returns to the start. The position runs on from task to task. Of a task with many samples the
    ring therefore holds the latest; slots that a short task never reached count as absent.
    """

    def __init__(self, memory: int, tasks: int) -> None:
        self.slots = memory // tasks
        self._current = -1
        self._position = 0
        self._stored: Batch | None = None  # preallocated at the first write; rings follow each other
        self._written = torch.zeros(tasks * self.slots, dtype=torch.bool, device="cpu")

    def begin_task(self) -> None:
        """Open the next task's ring."""
        self._current += 1

    def write(self, batch: Batch) -> None:
        """Take in a batch of the current task."""
        if self._stored is None:
            self._stored = Batch(*(room(part, len(self._written)) for part in (batch.x, batch.y, batch.task)))
        batch.require_like(self._stored)  # else a sample of one number would fill a whole row
        count = min(len(batch), self.slots - self._position)
        start = self._current * self.slots + self._position
        into = slice(start, start + count)
        try:
            self._put(into, batch[:count])
        except BaseException:  # split by an interrupt: a sample must not stand with another one's label
            self._put(into, batch[:count])
            raise
        self._position = (self._position + count) % self.slots

    def _put(self, into: slice, batch: Batch) -> None:
        assert self._stored is not None
        self._stored.x[into] = batch.x
        self._stored.y[into] = batch.y
        self._stored.task[into] = batch.task
        self._written[into] = True  # at last: what is counted is there

    def past(self) -> list[Batch]:
        """What is held of each task before the current one, in slot order; tasks that left nothing are passed over."""
        if self._stored is None:
            return []
        rings = (range(task * self.slots, (task + 1) * self.slots) for task in range(self._current))
        held = (self._stored[torch.tensor(ring, device="cpu")[self._written[ring.start : ring.stop]]] for ring in rings)
        return [batch for batch in held if len(batch)]

    def state(self) -> State:
        """Content and position."""
        held = None if self._stored is None else self._stored[self._written.nonzero().flatten()]
        return {"task": self._current, "position": self._position, "written": self._written, "held": held}

    def load_state(self, state: State) -> None:
        """The same content and position again."""
        if state["written"].dtype != torch.bool or state["written"].shape != self._written.shape:
            raise ValueError("the rings are not those of this memory and these tasks")
        self._current, self._position, self._written = state["task"], state["position"], state["written"].cpu()
        self._stored = None
        if state["held"] is not None:
            parts = state["held"].x, state["held"].y, state["held"].task
            self._stored = Batch(*(room(part, len(self._written)) for part in parts))
            for whole, part in zip((self._stored.x, self._stored.y, self._stored.task), parts, strict=True):
                whole[self._written] = part

    def bytes_held(self) -> int:
        """Memory of all rings as allocated."""
        if self._stored is None:
            return 0
        return sum(part.nbytes for part in (self._stored.x, self._stored.y, self._stored.task))


def check_shares(memory: int, tasks: int) -> None:
    """Refuse a memory too small to give every task a sample."""
    if memory < tasks:
        raise UsageError(f"memory = {memory} shared by tasks = {tasks} leaves no sample for each: raise memory.")


def check_room(task: Task, before: int, tasks: int) -> None:
    """Refuse a task beyond those the memory was cut for."""
    if before >= tasks:
        raise UsageError(
            f"{task.name}: the memory is shared by tasks = {tasks}, and {before} come before this one: "
            "set tasks to the number of tasks there will be (and memory to at least as much)."
        )
