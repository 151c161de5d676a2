"""Ring memories: for every task the last samples it showed, in slots of its own (GEM and A-GEM)."""

from __future__ import annotations

import torch

from steppe.checkpoint.tree import State
from steppe.data.task import Task
from steppe.errors import ModelError, UsageError
from steppe.methods.parts.reservoir import allocate_rows
from steppe.methods.parts.single_sample import require_batchable
from steppe.methods.parts.task_gradients import PastTasks
from steppe.network.network import Network
from steppe.tensors.batch import Batch


class TaskRingBuffer:
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

    def add(self, batch: Batch) -> None:
        """Take in a batch of the current task."""
        if self._stored is None:
            self._stored = Batch(*(allocate_rows(part, len(self._written)) for part in (batch.x, batch.y, batch.task)))
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

    def state_dict(self) -> State:
        """Content and position."""
        held = None if self._stored is None else self._stored[self._written.nonzero().flatten()]
        return {"task": self._current, "position": self._position, "written": self._written, "held": held}

    def load_state_dict(self, state: State) -> None:
        """The same content and position again."""
        if state["written"].dtype != torch.bool or state["written"].shape != self._written.shape:
            raise ValueError("the rings are not those of this memory and these tasks")
        self._current, self._position, self._written = state["task"], state["position"], state["written"].cpu()
        self._stored = None
        if state["held"] is not None:
            parts = state["held"].x, state["held"].y, state["held"].task
            self._stored = Batch(*(allocate_rows(part, len(self._written)) for part in parts))
            for whole, part in zip((self._stored.x, self._stored.y, self._stored.task), parts, strict=True):
                whole[self._written] = part

    def memory_bytes(self) -> int:
        """Memory of all rings as allocated."""
        if self._stored is None:
            return 0
        return sum(part.nbytes for part in (self._stored.x, self._stored.y, self._stored.task))


def validate_memory_size(memory: int, tasks: int) -> None:
    """Refuse a memory too small to give every task a sample."""
    if memory < tasks:
        raise UsageError(f"memory = {memory} shared by tasks = {tasks} leaves no sample for each: raise memory.")


def validate_task_count(task: Task, before: int, tasks: int) -> None:
    """Refuse a task beyond those the memory was cut for."""
    if before >= tasks:
        raise UsageError(
            f"{task.name}: the memory is shared by tasks = {tasks}, and {before} come before this one: "
            "set tasks to the number of tasks there will be (and memory to at least as much)."
        )


_MORE = "raise memory to two samples for each task or more"


def require_uniform_weights(network: Network) -> None:
    """Refuse weights of several types, or on several devices: the gradients of past tasks are put together from all."""
    (first, start), *others = network.trainable.items()
    for name, weight in others:
        if (weight.dtype, weight.device) != (start.dtype, start.device):
            raise ModelError(
                "the weights are of several types, or on several devices "
                f"({first!r} is {start.dtype} on {start.device}, {name!r} {weight.dtype} on {weight.device}), and the "
                "gradients of past tasks are put together from all of them: make the weights alike (model.float()), or "
                "use a replay method such as er."
            )


class TaskMemory:
    """Rings that the current task writes to, and `past`, the gradients on what earlier tasks wrote."""

    def __init__(self, network: Network, memory: int, tasks: int) -> None:
        self._network = network
        self._shares = f"memory = {memory} shared by tasks = {tasks}"
        self.rings = TaskRingBuffer(memory, tasks)
        self.past = PastTasks(network, [])

    def begin_task(self) -> None:
        """Open the next task's ring, and make the earlier ones ready."""
        self.rings.begin_task()
        self.past = PastTasks(self._network, self.rings.past())

    def require_batchable_rings(self) -> None:
        """Refuse a ring of one sample that the model cannot take by itself."""
        for batch in self.past.samples:
            require_batchable(self._network, batch, f"{self._shares} keeps a single sample of a past task", _MORE)

    def require_batchable_draws(self, count: int) -> None:
        """Refuse draws of one sample from all rings that the model cannot take by itself."""
        samples = self.past.samples
        if count == 1 and samples:
            cause = "reference_samples = 1 takes the reference gradient of a single sample"
            require_batchable(self._network, samples[0][:1], cause, "set reference_samples to 2 or more")
        elif len(samples) == 1:
            require_batchable(
                self._network, samples[0], f"{self._shares} keeps a single sample of the past task", _MORE
            )

    def add(self, batch: Batch) -> None:
        """Take in a batch of the current task."""
        self.rings.add(batch)

    def end_task(self) -> None:
        """What was made ready serves one task only."""
        self.past = PastTasks(self._network, [])

    def state_dict(self) -> State:
        """The rings, and which way the gradients are taken."""
        return {"rings": self.rings.state_dict(), "together": bool(self.past.linear)}

    def load_state_dict(self, state: State) -> None:
        """The same rings again, made ready as they were."""
        self.rings.load_state_dict(state["rings"])
        self.past = PastTasks(self._network, self.rings.past(), together=state["together"])

    def memory_bytes(self) -> int:
        """Memory of the rings as allocated."""
        return self.rings.memory_bytes()
