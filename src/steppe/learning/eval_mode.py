"""Running a learner's model in eval mode, after a task that was stopped has been ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.data.task import Task
from steppe.learning.checks import check_finite
from steppe.learning.evaluation import BATCH, as_inputs
from steppe.learning.learner_state import LearnerState
from steppe.learning.phases import Idle, PendingEnd
from steppe.methods.base import Method
from steppe.network.eval_batches import min_eval_batch
from steppe.runtime.contexts import training_context
from steppe.runtime.rng import GlobalRNG
from steppe.runtime.session import Session
from steppe.runtime.warn import warn_of
from steppe.tensors.nest import Nest, index_nest, nest_length

_Result = TypeVar("_Result")


class EvalMode(LearnerState):
    """A learner's state, with what prediction and evaluation share."""

    def _predict_with(self, x: Any, work: Callable[[Nest], Tensor]) -> Tensor:
        inputs = as_inputs(x, self.network)
        flat = isinstance(inputs, Tensor) and inputs.ndim < 2
        first = None if flat else index_nest(inputs, slice(min_eval_batch(self.model)))
        count = 1 if flat and not inputs.ndim else nest_length(inputs)
        return self._run_exclusively(
            lambda session: self._in_eval_mode(lambda: work(inputs), first, count, [], session)
        )

    def _in_eval_mode(
        self,
        work: Callable[[], _Result],
        first: Nest | None,
        count: int | None,
        tasks: Sequence[Task],
        session: Session,
    ) -> _Result:
        """Run some work that predicts `count` samples like the first ones; None: whole test sets."""
        self._end_pending_task()
        if self._metric is not None or self._workload.draws(self._method, tasks):
            session.use_global_rng(GlobalRNG(self.network.device))
        tiny = first is None or nest_length(first) == 0 or (count is not None and self._workload.is_tiny(first, count))
        if first is not None and not tiny:
            session.set_num_threads(self._workload.threads(first, BATCH if count is None else min(count, BATCH)))
        predicting = nullcontext() if self._method is None else self._method.prediction_weights()
        with torch.no_grad(), self.network.mode(training=False), predicting:
            return work()

    def _end_pending_task(self) -> None:
        """End the task that was stopped by the callback or Ctrl-C, which would otherwise be unprotected.

        This is not done at once, because the user who stops it may be in a hurry.
        """
        if not isinstance(self.phase, PendingEnd):
            return
        pending, method = self.phase, self._method
        assert method is not None

        def end(session: Session) -> list[str]:
            session.use_global_rng(GlobalRNG(self.network.device, self.streams))
            session.set_num_threads(pending.threads)
            with training_context(self.network.device), self.network.mode(training=True):
                if pending.best:
                    self.network.restore(pending.best)
                    method.weights_restored()
                remarks = self._end_task(method, pending.name)
            self.phase = Idle()
            return remarks

        warn_of(self._run_exclusively(end))

    def _end_task(self, method: Method, name: str) -> list[str]:
        check_finite(self.network.trainable, f"after task {name!r}")
        streams = self.streams.state_dict()
        try:
            remarks = method.end_task()
        except BaseException:
            self.streams.load_state_dict(streams)  # if it is ended later, then in the same way
            raise
        if method.descent is not None:
            method.descent.restart()  # momentum is not used again, but would be kept and copied
        return remarks

    def _reduced_state(self) -> State:
        """The state without working memory, where that can be rebuilt."""
        state = self._whole_state()
        if isinstance(self.phase, Idle) and self._method is not None and self.num_tasks:
            reduced = self._as_at_task_end(self._method, self._method.reduced_state_dict)
            state["method"] = state["method"] if reduced is None else reduced
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore a state from `state_dict`; see `LearnerState.load_state_dict`."""
        super().load_state_dict(state)
        if self._method is not None and self._method.rebuild_threads is not None:
            self._as_at_task_end(self._method, self._method.rebuild_working_memory)

    def _as_at_task_end(self, method: Method, work: Callable[[], _Result]) -> _Result:
        """Run some work in the circumstances in which the last task was ended, on which bits depend."""

        def run(session: Session) -> _Result:
            session.use_global_rng(GlobalRNG(self.network.device))
            if method.rebuild_threads is not None:
                session.set_num_threads(method.rebuild_threads)
            with training_context(self.network.device), self.network.mode(training=True):
                return work()

        return self._run_exclusively(run)
