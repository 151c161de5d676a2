"""The interface of a continual-learning method: `MethodConfig` holds its settings, `Method` updates the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from steppe.checkpoint.tree import State, Stateful
from steppe.errors import UsageError
from steppe.methods.parts.descent import Descent
from steppe.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from steppe.data.task import Task
    from steppe.network.growing_head import GrowingHead
    from steppe.network.network import Network
    from steppe.projection.layers import ProjectedWeight
    from steppe.runtime.rng import Streams
    from steppe.tensors.batch import Batch
    from steppe.tensors.nest import Nest


class MethodConfig(Settings, ABC):
    """Base class of every method's settings: a frozen dataclass whose `start` builds the method.

    Declare each field with `steppe.setting(default, help)`; types and limits are checked on construction.

    Example:
        >>> import steppe
        >>> config = steppe.ER(buffer=500)
        >>> config.buffer, config.momentum
        (500, 0.9)
        >>> config.replace(lr=0.1).lr
        0.1
        >>> steppe.ER(lr=-1)
        Traceback (most recent call last):
        ...
        steppe.errors.UsageError: lr = -1.0 is out of range; it must be above 0.
    """

    uses_projection: ClassVar[bool] = False
    """Whether the method projects gradients and needs the layers whose weights can be projected."""

    working_memory: ClassVar[tuple[str, ...]] = ()
    """The kinds in `Method.memory_bytes` that need not be kept between tasks: they can be rebuilt from the others and
    the weights.
    """

    needs_tasks: ClassVar[bool] = False
    """Whether the method needs tasks with borders, so that it cannot learn from a stream (`Learner.observe`)."""

    takes_any_loss: ClassVar[bool] = True
    """Whether the method learns with any loss that the learner is created with. Then it computes losses only with
    `network.loss_and_grad`, `network.loss` or `network.output_loss`. False if it needs class numbers as targets.
    """

    takes_any_optimizer: ClassVar[bool] = True
    """Whether its steps can be those of the user's optimizer. Then its `descent` comes from
    `methods.parts.descent.make_descent`. False if it takes steps of its own.
    """

    schedule: ClassVar[Literal["sequential", "joint", "retrain"]] = "sequential"
    """How a benchmark presents its tasks: one after another, all at once, or at each task all so far from scratch."""

    def validate(self, task: Task, heads: Sequence[range | None]) -> None:
        """Reject a task that the method cannot learn next, before anything changes; by default none is rejected.

        Args:
            task: The task about to be learned.
            heads: The heads of the tasks learned so far, in order; None for a task that uses all outputs.
        """

    @abstractmethod
    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> Method:
        """Build the method for a network.

        Args:
            network: The network to train.
            covered: The weights whose gradients can be projected, by parameter name; empty unless `uses_projection`.
            streams: The random streams of the run. Draw randomness from nowhere else.

        Returns:
            The method, ready for its first task.
        """


class Method(ABC):
    """A method that trains a network.

    For each task the learner calls `begin_task`; then, for each batch, `observe` once per update and, in the first
    epoch only, `after_batch` once; finally `end_task`.

    Example:
        A method that takes plain SGD steps, and its settings:

        >>> from dataclasses import dataclass
        >>> import steppe, torch
        >>> from steppe.methods.parts.descent import make_descent
        >>> class PlainSGD(steppe.Method):
        ...     state_attrs = ("descent",)
        ...     def __init__(self, network, lr):
        ...         self.network, self.descent = network, make_descent(network, lr, momentum=0.0)
        ...     def observe(self, batch):
        ...         loss, gradient = self.network.loss_and_grad(self.network.prepare(batch))
        ...         self.descent.step(gradient)
        ...         return loss
        >>> @dataclass(frozen=True)
        ... class PlainSGDConfig(steppe.MethodConfig):
        ...     lr: float = steppe.setting(0.1, "learning rate", above=0)
        ...     def start(self, network, covered, streams):
        ...         return PlainSGD(network, self.lr)
        >>> learner = steppe.Learner(torch.nn.Linear(4, 2), PlainSGDConfig())
        >>> x, y = torch.randn(20, 4), torch.arange(20) % 2
        >>> _ = learner.learn(steppe.Task((x, y)))
        >>> learner.num_tasks
        1
    """

    network: Network
    descent: Descent | None = None
    """What moves the weights: SGD or the user's optimizer; None if the method moves them itself."""

    state_attrs: ClassVar[tuple[str, ...] | None] = None
    """Names of the attributes to save so that training can be resumed, beside the model and the random streams: objects
    with a `state_dict` (`descent`, a reservoir), numbers, tensors, batches, and lists and dictionaries of these. None
    means undeclared: runs of the method cannot be resumed.
    """

    uses_bare_batch: bool = False
    """Whether an update runs the model on the batch alone, without replay samples. If so, a batch of one sample that
    BatchNorm cannot normalize is rejected before the task is learned.
    """

    def begin_task(self) -> None:
        """Start a task: reset the learning rates and clear the momentum."""
        if self.descent is not None:
            self.descent.restart()

    def decay_lr(self, divisor: float) -> float:
        """Divide every learning rate until the end of the task, and clear the momentum.

        Args:
            divisor: The number to divide by.

        Returns:
            The current learning rate.

        Raises:
            UsageError: If the method has no `descent` and does not override this.
        """
        if self.descent is None:
            raise UsageError(f"{type(self).__name__} has no learning rate to decay: train it with patience=0.")
        return self.descent.decay_lr(divisor)

    def grow_head(self, head: GrowingHead) -> None:
        """Give everything that has the output layer's shape its new rows. By default: the momentum.

        Called after the layer has grown, between two updates. After an exception it may be called again.

        Args:
            head: The layer; `head.fit(name, tensor)` extends a tensor that has the shape of one of its parameters.
        """
        if self.descent is not None:
            self.descent.grow_head(head)

    @abstractmethod
    def observe(self, batch: Batch) -> Tensor:
        """Make one update from a batch of the current task.

        Args:
            batch: The samples as stored; pass them through `network.prepare` before the model sees them.

        Returns:
            The loss that the update descended, detached.
        """

    def after_batch(self, batch: Batch) -> None:  # noqa: B027 - a method need not keep anything
        """Store what the method needs from a batch, which it will not be offered again.

        Args:
            batch: The samples as stored, after the last update on them in the first epoch.
        """

    def end_task(self) -> list[str]:
        """Finish the task.

        Returns:
            Remarks for the log.
        """
        return []

    def scores(self, x: Nest) -> Tensor:
        """The scores that prediction compares: the model's output, unless the method predicts in another way.

        Args:
            x: Prepared inputs, with the model in eval mode.

        Returns:
            One row per sample and one column per output.
        """
        return self.network.outputs(x)

    def prediction_weights(self) -> AbstractContextManager[None]:
        """While a task is learned: a context inside which the model holds the weights that predict.

        Returns:
            The context; by default nothing changes in it.
        """
        return nullcontext()

    def weights_restored(self) -> None:  # noqa: B027 - most methods keep no weights of their own
        """Take note that earlier weights, the best ones in validation, were restored into the model."""

    def memory_bytes(self) -> dict[str, int]:
        """Memory held between tasks, in bytes.

        Returns:
            Bytes by kind: always `replay` and `bases`; `logits`, `weights`, `rates`, `importances` and `gram` where
            used. Kinds in the settings' `working_memory` are held, but need not be kept.
        """
        return {"replay": 0, "bases": 0}

    def state_dict(self) -> State:
        """The state needed to resume between two batches or between two tasks.

        Returns:
            The attributes listed in `state_attrs`, by name.

        Raises:
            UsageError: If `state_attrs` is None.
        """
        if self.state_attrs is None:
            raise UsageError(
                f"{type(self).__name__} does not declare its state: list the attributes to save in `state_attrs`."
            )
        parts = {name: getattr(self, name) for name in self.state_attrs}
        return {name: part.state_dict() if isinstance(part, Stateful) else part for name, part in parts.items()}

    def reduced_state_dict(self) -> State | None:
        """The state between two tasks without the working memory that `rebuild_working_memory` brings back.

        Returns:
            The state; None if working memory cannot be rebuilt to the same bits, or there is none.
        """
        return None

    @property
    def rebuild_threads(self) -> int | None:
        """With how many threads to call `rebuild_working_memory`; None if nothing is to be rebuilt."""
        return None

    def rebuild_working_memory(self) -> None:  # noqa: B027 - most methods have none
        """Rebuild what a state from `reduced_state_dict` leaves out, once it is loaded."""

    def load_state_dict(self, state: State) -> None:
        """Restore a state. Learning-rate decays of the current task have already been applied again.

        Args:
            state: A state from `state_dict`.

        Raises:
            ValueError: If its keys are not those of `state_attrs`.
        """
        if state.keys() != set(self.state_attrs or ()):
            raise ValueError(f"expected the state keys {sorted(self.state_attrs or ())}, got {sorted(state, key=str)}")
        for name, value in state.items():
            part = getattr(self, name)
            if isinstance(part, Stateful):
                part.load_state_dict(value)
            else:
                setattr(self, name, value)

    def diagnostics(self) -> dict[str, Any]:
        """What to record after a task for figures and reports, such as ranks and importances.

        Returns:
            Numbers, lists and dictionaries that can be written as JSON.
        """
        return {}
