"""What GEM and A-GEM share: SGD, and samples of each past task for the gradients that constrain a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from steppe.checkpoint.tree import State
from steppe.data.task import Task
from steppe.errors import ModelError, UsageError
from steppe.methods.parts.ring_buffer import TaskRingBuffer
from steppe.methods.parts.sgd_method import SGDConfig, SGDMethod
from steppe.methods.parts.single_sample_checks import require_batchable
from steppe.methods.parts.task_gradients import PastTasks
from steppe.network.network import Network
from steppe.settings import setting
from steppe.tensors.batch import Batch

_MORE = "raise memory to at least two samples per task"


@dataclass(frozen=True)
class TaskMemoryConfig(SGDConfig):
    """Settings of SGD, and the size of the memory."""

    needs_tasks = True

    clip: float = setting(2.0, "maximum norm of each gradient, past tasks' included; 0 disables clipping", at_least=0)
    memory: int = setting(200, "memory size in samples, divided equally among the tasks", at_least=1)
    tasks: int = setting(20, "number of tasks that share the memory; one more is an error", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < self.tasks:
            raise UsageError(
                f"memory = {self.memory} shared by tasks = {self.tasks} leaves some without a sample: raise memory to "
                f"{self.tasks}."
            )

    def validate(self, task: Task, heads: Sequence[range | None]) -> None:
        """Reject a task for which the memory has no ring.

        Args:
            task: The task about to be learned.
            heads: The heads of the tasks learned so far.

        Raises:
            UsageError: If the memory's tasks have all been learned.
        """
        if len(heads) >= self.tasks:
            raise UsageError(
                f"{task.name}: the memory is divided among tasks = {self.tasks}, but this is task number "
                f"{len(heads) + 1}: set tasks to the number of tasks to be learned (and memory to at least that)."
            )


TaskMemoryConfigT = TypeVar("TaskMemoryConfigT", bound=TaskMemoryConfig)


class TaskMemoryMethod(SGDMethod[TaskMemoryConfigT]):
    """A method with a `memory` of each task's samples.

    Args:
        settings: The method's settings.
        network: The network to train.
    """

    uses_bare_batch = True
    state_attrs = ("descent", "memory")

    def __init__(self, settings: TaskMemoryConfigT, network: Network) -> None:
        super().__init__(settings, network)
        self.memory = TaskMemory(network, settings.memory, settings.tasks)

    def begin_task(self) -> None:
        self.memory.begin_task()
        self.require_batchable_memory()
        super().begin_task()

    def require_batchable_memory(self) -> None:
        """Reject a memory with a single sample where BatchNorm needs several."""
        self.memory.require_batchable_rings()

    def after_batch(self, batch: Batch) -> None:
        self.memory.add(batch)

    def end_task(self) -> list[str]:
        self.memory.end_task()
        return []

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": self.memory.memory_bytes(), "bases": 0}


class TaskMemory:
    """The ring buffer, and in `past` the gradients on what earlier tasks stored in it.

    Args:
        network: The network to train.
        memory: The number of samples in all rings together.
        tasks: The number of rings.
    """

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
