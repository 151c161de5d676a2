"""What GEM and A-GEM remember: samples of every task in rings, those of past tasks made ready once per task."""

from __future__ import annotations

from steppe.methods.task_gradients import PastTasks
from steppe.network import Network
from steppe.rings import Rings
from steppe.state import State
from steppe.types import Batch


class TaskMemory:
    """Rings that the current task writes to, and `past`, the gradients on what earlier tasks wrote."""

    def __init__(self, network: Network, memory: int, tasks: int) -> None:
        self._network = network
        self.rings = Rings(memory, tasks)
        self.past = PastTasks(network, [])

    def begin_task(self) -> None:
        """Open the next task's ring, and make the earlier ones ready."""
        self.rings.begin_task()
        self.past = PastTasks(self._network, self.rings.past())

    def write(self, batch: Batch) -> None:
        """Take in a batch of the current task."""
        self.rings.write(batch)

    def end_task(self) -> None:
        """What was made ready serves one task only."""
        self.past = PastTasks(self._network, [])

    def state(self) -> State:
        """The rings, and which way the gradients are taken."""
        return {"rings": self.rings.state(), "together": bool(self.past.linear)}

    def load_state(self, state: State) -> None:
        """The same rings again, made ready as they were."""
        self.rings.load_state(state["rings"])
        self.past = PastTasks(self._network, self.rings.past(), together=state["together"])

    def bytes_held(self) -> int:
        """Memory of the rings as allocated."""
        return self.rings.bytes_held()
