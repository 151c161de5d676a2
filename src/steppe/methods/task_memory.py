"""What GEM and A-GEM remember: samples of every task in rings, those of past tasks made ready once per task."""

from __future__ import annotations

from steppe.errors import ModelError
from steppe.methods.lone_samples import check_alone
from steppe.methods.task_gradients import PastTasks
from steppe.network import Network
from steppe.rings import Rings
from steppe.state import State
from steppe.types import Batch

_MORE = "raise memory to two samples for each task or more"


def require_one_kind(network: Network) -> None:
    """Refuse weights of several types, or on several devices: the gradients of past tasks are put together from all."""
    (first, start), *others = network.parameters.items()
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
        self.rings = Rings(memory, tasks)
        self.past = PastTasks(network, [])

    def begin_task(self) -> None:
        """Open the next task's ring, and make the earlier ones ready."""
        self.rings.begin_task()
        self.past = PastTasks(self._network, self.rings.past())

    def check_tasks(self) -> None:
        """Refuse a ring of one sample that the model cannot take by itself."""
        for batch in self.past.samples:
            check_alone(self._network, batch, f"{self._shares} keeps a single sample of a past task", _MORE)

    def check_draw(self, count: int) -> None:
        """Refuse draws of one sample from all rings that the model cannot take by itself."""
        samples = self.past.samples
        if count == 1 and samples:
            cause = "reference_samples = 1 takes the reference gradient of a single sample"
            check_alone(self._network, samples[0][:1], cause, "set reference_samples to 2 or more")
        elif len(samples) == 1:
            check_alone(self._network, samples[0], f"{self._shares} keeps a single sample of the past task", _MORE)

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
