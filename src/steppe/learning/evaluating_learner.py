"""Evaluation and prediction, after a task that was stopped has been ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from steppe.checkpoint.tree import State
from steppe.data.task import Task, check_head
from steppe.errors import UsageError
from steppe.learning.checks import check_finite
from steppe.learning.evaluation import BATCH, as_inputs, outputs, predictions, probabilities, results
from steppe.learning.learner_base import LearnerBase
from steppe.learning.phases import Idle, PendingEnd
from steppe.learning.task_checks import as_task_list
from steppe.methods.base import Method
from steppe.network.eval_batches import min_eval_batch
from steppe.runtime.contexts import training_context
from steppe.runtime.rng import GlobalRNG
from steppe.runtime.session import Session
from steppe.runtime.warn import warn_of
from steppe.tensors.nest import Nest, index_nest, nest_length

_Result = TypeVar("_Result")


class EvaluatingLearner(LearnerBase):
    """A learner's state, with what needs its model in eval mode."""

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
        """Restore a state from `state_dict`; see `LearnerBase.load_state_dict`."""
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

    def evaluate(self, tasks: Task | Sequence[Task]) -> list[float]:
        """Measure the test accuracy, or the learner's `metric`.

        Args:
            tasks: One task or several, each with test data. They need not have been learned.

        Returns:
            The accuracy on each task, in percent, or its metric. Each sample is predicted within its task's head.

        Raises:
            DataError: A task has no test data, or data that the model does not accept.
            UsageError: The metric fails, or there is none and accuracy is not defined.
            DivergedError: The model's output is not finite.
        """
        listed = as_task_list(tasks)

        def test() -> list[float]:
            grows = self._growing is not None
            return results(listed, self.network, self._method, self._input_kind, self._metric, grows=grows)

        tests = [task.test for task in listed if task.test is not None]
        first = self.network.inputs.as_stored(tests[0].first()[0]) if tests else None
        return self._run_exclusively(lambda session: self._in_eval_mode(test, first, None, listed, session))

    def predict(self, x: Any, head: range | None = None) -> Tensor:
        """Predict the most likely class of each sample.

        Args:
            x: Any number of inputs, in the form in which the tasks' inputs are stored. They are processed in batches.
            head: The columns of the logits to choose from; by default all.

        Returns:
            The column of the highest logit for each sample, (n,), on the device of `x`.

        Raises:
            DataError: The model does not accept the inputs, or `head` is not a range of its outputs.
        """
        check_head(head)
        return self._predict_with(
            x, lambda inputs: predictions(inputs, head, self.network, self._method, self._input_kind)
        )

    def predict_proba(self, x: Any, head: range | None = None) -> Tensor:
        """Predict the probability of each class: the softmax of the logits.

        Args:
            x: Any number of inputs, in the form in which the tasks' inputs are stored.
            head: The columns of the logits to choose from; by default all.

        Returns:
            One row per sample that sums to 1, (n, outputs), with 0 outside the head; on the device of `x`. Its largest
            entry is what `predict` returns.

        Raises:
            UsageError: The learner has a loss of its own, or its method does not predict by logits.
            DataError: The model does not accept the inputs, or `head` is not a range of its outputs.
        """
        check_head(head)
        if not self.network.output_loss.is_cross_entropy:
            raise UsageError(
                "the learner has its own loss, so its outputs need not be logits of classes; turn learner.outputs(x) "
                "into probabilities the way the loss does, such as with .softmax(1) or .sigmoid()."
            )
        if self._method is not None and type(self._method).scores is not Method.scores:
            raise UsageError(
                f"{type(self.settings).__name__} does not predict by logits, so there are no probabilities; use "
                "predict(x), or learner.outputs(x) for the logits."
            )
        return self._predict_with(
            x, lambda inputs: probabilities(inputs, head, self.network, self._method, self._input_kind)
        )

    def outputs(self, x: Any) -> Tensor:
        """Compute the model's output, in eval mode and in batches.

        Args:
            x: Any number of inputs, in the form in which the tasks' inputs are stored.

        Returns:
            The output for each sample, (n, ...), on the device of `x`.

        Raises:
            DataError: The model does not accept the inputs.
        """
        return self._predict_with(x, lambda inputs: outputs(inputs, self.network, self._input_kind))
