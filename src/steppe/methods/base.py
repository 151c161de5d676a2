"""What a method is: settings that can start it, and a learner that sees one batch after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from steppe.checkpoint.tree import State, Stateful
from steppe.errors import UsageError
from steppe.methods.parts.sgd import MomentumSGD
from steppe.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from steppe.data.task import Task
    from steppe.network.network import Network
    from steppe.projection.layers import ProjectedWeight
    from steppe.runtime.rng import Streams
    from steppe.tensors.batch import Batch


class MethodConfig(Settings, ABC):
    """Base of every method's settings; `start` gives the running method."""

    uses_projection: ClassVar[bool] = False
    """Whether the method projects gradients, and so needs the model's covered layers."""

    schedule: ClassVar[Literal["sequential", "joint", "retrain"]] = "sequential"
    """How a benchmark's tasks are presented: one after another; all at once; or, at each, all so far from the start."""

    def validate(self, task: Task, heads: Sequence[range | None]) -> None:
        """Refuse a task that the method cannot learn after those with these heads, before anything is changed."""

    @abstractmethod
    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """The method at work on a network. `covered` is empty unless `uses_projection` is set."""


class Method(ABC):
    """A method at work. Per task: begin, then for each batch `observe` once per glance and `after_batch` once (in the
    first epoch), then end.
    """

    network: Network
    descent: MomentumSGD | None = None
    """SGD on the weights, where the method takes its steps by it."""

    state_attrs: ClassVar[tuple[str, ...] | None] = None
    """The attributes that must be kept to go on after a break, beside the model and the streams: things with a state of
    their own (`descent`, a reservoir), numbers, tensors, batches, lists and dictionaries of them. None: not said, so
    runs of the method cannot be resumed.
    """

    uses_bare_batch: bool = False
    """Whether an update gives the model the batch by itself, with no other samples beside it: a batch of one sample
    that BatchNorm could not take is then refused before the task is learnt.
    """

    def begin_task(self) -> None:
        """The next task starts: step sizes are the first ones again, and momentum is forgotten."""
        if self.descent is not None:
            self.descent.restart()

    def decay_lr(self, divisor: float) -> float:
        """Divide every step size until the task's end, and forget the momentum; returns the step size now."""
        if self.descent is None:
            raise UsageError(f"{type(self).__name__} has no step size that could be cut: train it with patience=0.")
        return self.descent.decay_lr(divisor)

    @abstractmethod
    def observe(self, batch: Batch) -> Tensor:
        """One update from a batch of the current task, as stored; returns the loss it descended."""

    def after_batch(self, batch: Batch) -> None:  # noqa: B027 - a method need not keep anything
        """The batch has been learnt from and will not be offered again."""

    def end_task(self) -> list[str]:
        """The task is over; returns remarks for the log."""
        return []

    def scores(self, x: Tensor) -> Tensor:
        """What prediction compares, (n, outputs), from prepared inputs in eval mode: the model's output unless the
        method predicts in a way of its own.
        """
        return self.network.outputs(x)

    def memory_bytes(self) -> dict[str, int]:
        """Memory kept from task to task, in bytes, by kind (replay, logits, weights, rates, bases, importances);
        replay and bases are always named.
        """
        return {"replay": 0, "bases": 0}

    def state_dict(self) -> State:
        """What has to be kept to go on after a break between two batches, or between two tasks."""
        if self.state_attrs is None:
            raise UsageError(
                f"{type(self).__name__} does not say what has to be kept of it: name its attributes in `state_attrs`."
            )
        parts = {name: getattr(self, name) for name in self.state_attrs}
        return {name: part.state_dict() if isinstance(part, Stateful) else part for name, part in parts.items()}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; step sizes that were cut in the current task have been cut again before."""
        if state.keys() != set(self.state_attrs or ()):
            raise ValueError(f"{sorted(state, key=str)} is there, where {sorted(self.state_attrs or ())} is to be kept")
        for name, value in state.items():
            part = getattr(self, name)
            if isinstance(part, Stateful):
                part.load_state_dict(value)
            else:
                setattr(self, name, value)

    def diagnostics(self) -> dict[str, Any]:
        """What is worth recording after a task: ranks, importances, whatever figures will want."""
        return {}
