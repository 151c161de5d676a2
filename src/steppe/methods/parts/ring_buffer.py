"""Ring buffers: each task's most recent samples, in slots of their own (GEM and A-GEM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.data.task import Task
from steppe.errors import ModelError, UsageError
from steppe.methods.parts.reservoir import allocate_batch
from steppe.methods.parts.single_sample import require_batchable
from steppe.methods.parts.task_gradients import PastTasks
from steppe.network.network import Network
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


def validate_memory_size(memory: int, tasks: int) -> None:
    """Reject a memory too small for one sample per task."""
    if memory < tasks:
        raise UsageError(
            f"memory = {memory} shared by tasks = {tasks} leaves some without a sample: raise memory to {tasks}."
        )


def validate_task_count(task: Task, before: int, tasks: int) -> None:
    """Reject a task for which the memory has no ring."""
    if before >= tasks:
        raise UsageError(
            f"{task.name}: the memory is divided among tasks = {tasks}, but this is task number {before + 1}: set "
            "tasks to the number of tasks to be learned (and memory to at least that)."
        )


_MORE = "raise memory to at least two samples per task"


def require_uniform_weights(network: Network) -> None:
    """Reject weights of several types or on several devices: past tasks' gradients combine all weights."""
    (first, start), *others = network.trainable.items()
    for name, weight in others:
        if (weight.dtype, weight.device) != (start.dtype, start.device):
            raise ModelError(
                "the weights are of several types, or on several devices "
                f"({first!r} is {start.dtype} on {start.device}, {name!r} {weight.dtype} on {weight.device}), but the "
                "gradients of past tasks combine all of them: convert the weights (model.float()) or use a replay "
                "method such as er."
            )


class TaskMemory:
    """The ring buffer, and in `past` the gradients on what earlier tasks stored in it."""

    def __init__(self, network: Network, memory: int, tasks: int) -> None:
        self._network = network
        self._shares = f"memory = {memory} shared by tasks = {tasks}"
        self.rings = TaskRingBuffer(memory, tasks)
        self.past = PastTasks(network, [])

    def begin_task(self) -> None:
        """Switch to the next task's ring, and prepare the earlier tasks' samples."""
        self.rings.begin_task()
        self.past = PastTasks(self._network, self.rings.past())

    def require_batchable_rings(self) -> None:
        """Reject rings of one sample if BatchNorm cannot normalize it."""
        for batch in self.past.samples:
            require_batchable(self._network, batch, f"{self._shares} keeps a single sample of a past task", _MORE)

    def require_batchable_draws(self, count: int) -> None:
        """Reject batches drawn from all rings if they are a single sample that BatchNorm cannot normalize."""
        samples = self.past.samples
        if count == 1 and samples:
            cause = "reference_samples = 1 takes the reference gradient of a single sample"
            require_batchable(self._network, samples[0][:1], cause, "set reference_samples to 2 or more")
        elif len(samples) == 1:
            require_batchable(
                self._network, samples[0], f"{self._shares} keeps a single sample of the past task", _MORE
            )

    def add(self, batch: Batch) -> None:
        """Store a batch of the current task."""
        self.rings.add(batch)

    def end_task(self) -> None:
        """Drop the prepared samples, which serve one task only."""
        self.past = PastTasks(self._network, [])

    def state_dict(self) -> State:
        """The rings, and whether gradients are computed together."""
        return {"rings": self.rings.state_dict(), "together": bool(self.past.linear)}

    def load_state_dict(self, state: State) -> None:
        """Restore the rings, and prepare the earlier tasks' samples the same way."""
        self.rings.load_state_dict(state["rings"])
        self.past = PastTasks(self._network, self.rings.past(), together=state["together"])

    def memory_bytes(self) -> int:
        """The allocated memory of the rings."""
        return self.rings.memory_bytes()
