"""Running a learner's model in eval mode, after a task that was stopped has been ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

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
        with torch.no_grad(), self.network.mode(training=False):
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
