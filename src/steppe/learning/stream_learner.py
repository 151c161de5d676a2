"""Learning from a stream without declared tasks: batch by batch, with a memory update every so many samples.

Between two memory updates lies a segment of the stream. To the method a segment is what a task is otherwise: it begins
with `begin_task` and ends with `end_task`, which updates bases, importances and the like.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from torch import Tensor

from steppe.data.samples import TensorSamples
from steppe.data.task import Task
from steppe.errors import DataError, UsageError, short_repr
from steppe.learning.checks import frozen_eval_layers
from steppe.learning.evaluating_learner import EvaluatingLearner
from steppe.learning.events import Callback, MemoryUpdated, ignore
from steppe.learning.input_kind import kind_of
from steppe.learning.learner_base import UserCallback
from steppe.learning.loop import Losses, observe
from steppe.learning.phases import Idle, Interrupted, Streaming
from steppe.methods.base import Method
from steppe.network.heads import is_class_numbers
from steppe.runtime.contexts import training_context
from steppe.runtime.rng import GlobalRNG
from steppe.runtime.session import Session
from steppe.tensors.batch import Batch
from steppe.tensors.nest import Nest, index_nest, nest_to_device

_CHECK_EVERY = 0.2  # seconds between checks that losses are finite: each waits for the device
_NAME = "the stream"


class StreamLearner(EvaluatingLearner):
    """The part of a learner that learns from a stream."""

    _losses: Losses | None = None  # since the last check
    _checked_at = 0.0

    def observe(self, batch: Any, *, update_every: int = 1000, updates: int = 1, callback: Callback = ignore) -> Tensor:
        """Learn from the next batch of a stream, without declared tasks.

        The samples use all outputs of the model; with `grow=True` new labels enlarge it first. Call `predict`,
        `evaluate` and `save` at any time in between. A learner that is loaded from a file resumes to the same bits.

        A batch that is refused changes nothing. If the update itself fails, what it changed stays.

        Args:
            batch: Inputs and labels in the form in which tasks' data are given, but no Dataset and no DataLoader.
            update_every: Update the method's memory (bases, importances of weights) once this many samples were
                learned since the last time, and begin with fresh momentum. Replay buffers are filled batch by batch.
            updates: Updates to make on the batch.
            callback: Called with a `steppe.MemoryUpdated` after the memory was updated.

        Returns:
            The loss of the last update, on the model's device.

        Raises:
            UsageError: The method needs declared tasks, an argument is invalid, or a task is to be resumed first.
            DataError: The batch does not fit the model.
            ModelError: The model does not fit the method.
            DivergedError: A loss or a weight is no longer finite; this may be found out a few batches later.

        Example:
            >>> import torch, steppe
            >>> learner = steppe.Learner(torch.nn.Linear(8, 2), steppe.ER(), head="weight", grow=True)
            >>> for step in range(6):
            ...     x, y = torch.randn(10, 8), torch.randint(0, 2 + step, (10,))
            ...     loss = learner.observe((x, y), update_every=30)
            >>> learner.predict(x).shape
            torch.Size([10])
        """
        for name, value in (("update_every", update_every), ("updates", updates)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} = {short_repr(value)} is invalid; expected a whole number of at least 1.")
        self._check_not_learning()
        task = Task(batch, name=_NAME)
        data = task.train
        if not isinstance(data, TensorSamples):
            raise DataError(f"expected a batch (inputs, labels) of tensors or arrays, got {type(batch).__name__}.")

        def learn(session: Session) -> Tensor:
            return self._observe(task, data, update_every, updates, UserCallback(callback, session), session)

        return self._run_exclusively(learn)

    def update_memory(self) -> list[str]:
        """Update the method's memory now, with what was learned from the stream since the last time.

        `observe` does this every so many samples, and `learn` before it begins a task.

        Returns:
            Remarks, such as on a weight that can no longer learn; none if there is nothing new.
        """
        self._check_not_learning()

        def update(session: Session) -> list[str]:
            if isinstance(self.phase, Streaming) and self._method is not None:
                self._set_up(session, self._method)
            return self._end_segment()

        return self._run_exclusively(update)

    def _set_up(self, session: Session, method: Method, x: Nest | None = None, count: int = 0) -> None:
        if x is not None:
            session.set_num_threads(self._workload.threads(x, count))
        if self._workload.draws(method):
            session.use_global_rng(GlobalRNG(self.network.device, self.streams))

    def _observe(
        self, task: Task, data: TensorSamples, update_every: int, updates: int, callback: Callback, session: Session
    ) -> Tensor:
        method = self._prepare(task, data)
        x = self._stored_inputs(task, data)
        self._set_up(session, method, index_nest(x, slice(1)), len(data))
        if isinstance(self.phase, Streaming) and self.phase.samples >= update_every:  # the last attempt failed
            self._end_segment(callback)
        with training_context(self.network.device):
            self._grow_head(task)
            with self.network.mode(training=True):
                if not isinstance(self.phase, Streaming):
                    self._begin_segment(task, method)
                x, y = nest_to_device(x, self.network.device), nest_to_device(data.y, self.network.device)
                stored = Batch.of_task(x, y, self.num_tasks - 1)
                for _ in range(updates):
                    loss = observe(method, stored, _NAME, _NAME)
                    self._note(loss)
                method.after_batch(stored)
        assert isinstance(self.phase, Streaming)
        self.phase = Streaming(self.phase.samples + len(data))
        if self.phase.samples >= update_every:
            self._end_segment(callback)
        return loss

    def _prepare(self, task: Task, data: TensorSamples) -> Method:
        """Validate a batch: completely at the start of a segment, and where it is of another kind than the last."""
        settings = self.settings
        if isinstance(self.phase, Interrupted):
            name = self.phase.loop_state["task"]
            raise UsageError(f"the learner was saved in the middle of {name!r}; resume that first with learn().")
        if settings.needs_tasks or settings.schedule != "sequential":
            raise UsageError(
                f"{type(settings).__name__} needs declared tasks, so it cannot learn from a stream; use learn(), or "
                "another method such as steppe.ER()."
            )
        kind = kind_of(self._stored_inputs(task, data))
        known = isinstance(self.phase, Streaming) and kind == self._input_kind and not self._just_loaded
        if known and self._method is not None and self._has_outputs_for(data.y):
            return self._method
        method = self._validate([task])
        self._eval_layers, self._just_loaded = frozen_eval_layers(self.model), False
        return method

    def _stored_inputs(self, task: Task, data: TensorSamples) -> Nest:
        with task.error_context("training"):
            return self.network.inputs.as_stored(data.x)

    def _has_outputs_for(self, y: Any) -> bool:
        """Whether targets fit the model as it is; with a loss of its own and a fixed head any do."""
        if self._growing is None and not self.network.output_loss.is_cross_entropy:
            return True
        return is_class_numbers(y) and 0 <= int(y.min()) <= int(y.max()) < self._num_outputs

    def _begin_segment(self, task: Task, method: Method) -> None:
        heads, num_tasks = list(self.network.heads.ranges), self.num_tasks
        try:
            self.network.weights.freeze_norms(False)
            self.network.weights.freeze_statistics(False)
            self.network.heads.add(None, self._num_outputs)
            self._use_chain_if_exact(task, num_tasks)
            method.begin_task()
            self.num_tasks, self.phase = num_tasks + 1, Streaming(0)
        except BaseException:
            self.num_tasks = num_tasks
            self.network.heads.set_ranges(heads, self._num_outputs)
            raise

    def _note(self, loss: Tensor) -> None:
        """Keep a loss, and check every so often that all since the last time are finite."""
        if self._losses is None:
            self._losses, self._checked_at = Losses(_NAME, 0, 0), time.monotonic()
        self._losses.add(loss)
        if time.monotonic() - self._checked_at > _CHECK_EVERY:
            self._check_losses()

    def _check_losses(self) -> None:
        losses, self._losses = self._losses, None
        if losses is not None:
            losses.settle()

    def _end_segment(self, callback: Callback = ignore) -> list[str]:
        """Update the memory if a segment has begun. If that fails, it can be repeated."""
        if not isinstance(self.phase, Streaming):
            return []
        self._check_losses()
        samples, method = self.phase.samples, self._method
        assert method is not None
        with training_context(self.network.device), self.network.mode(training=True):
            remarks = self._end_task(method, _NAME)
            self.phase = Idle()
        callback(MemoryUpdated(self.num_tasks - 1, samples, remarks, method.memory_bytes(), method.diagnostics()))
        return remarks

    @abstractmethod
    def _validate(self, tasks: list[Task]) -> Method: ...
