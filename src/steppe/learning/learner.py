"""The library's front door: a model, a method, and one task after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from steppe.checkpoint.io import write_state
from steppe.checkpoint.tree import State
from steppe.data.task import Task, check_head
from steppe.errors import DivergedError, ModelError, UsageError, one_line
from steppe.learning.checks import (
    as_task_list,
    asked_precision,
    check_finite,
    check_frozen_eval_layers,
    check_idle,
    check_last_batch,
    check_precision,
    check_same,
    check_unchanged,
    diagnose,
    frozen_eval_layers,
    has_extra_state,
    probe_inputs,
    validate_task,
)
from steppe.learning.evaluation import BATCH, accuracies, as_inputs, predictions
from steppe.learning.events import Callback, Event, ignore
from steppe.learning.learner_state import LearnerState
from steppe.learning.loop import TaskResult, TrainingLoop
from steppe.learning.task_group import TaskGroup
from steppe.methods.base import Method
from steppe.network.heads import check_room
from steppe.projection.coverage import coverage, warn_shared_head
from steppe.projection.layers import ProjectedWeight
from steppe.runtime.clocks import split_wall_cpu
from steppe.runtime.contexts import neutral_autograd, training_context
from steppe.runtime.rng import GlobalRNG, preserve_global_rng
from steppe.runtime.session import Session
from steppe.settings import TrainingConfig
from steppe.tensors.batch import Batch

_Result = TypeVar("_Result")


class Learner(LearnerState):
    """A PyTorch model that learns tasks one after another by a given method.

    The model is used as it is, in place: `learn` changes its weights and leaves nothing else behind (no hooks, no
    change of mode). `input_transform` turns stored inputs into what the model takes, on its device, batch by batch; by
    default bytes become numbers from 0 to 1. `exclude` names layers (or weights) that a gradient memory must leave
    alone; in multi-head learning the head is found and left alone by itself.

    While it learns and tests, torch uses `threads` threads; by default one where a batch is little work, and as many as
    torch is set to where it is more (docs/reliability.md). Several learners may work in several threads.
    """

    def learn(
        self,
        tasks: Task | Sequence[Task],
        *,
        epochs: int = 1,
        batch_size: int = 10,
        updates_per_batch: int = 1,
        patience: int = 0,
        lr_divisor: float = 2.0,
        lr_min: float = 1e-5,
        freeze_norms: bool = False,
        freeze_statistics: bool = False,
        precision: str = "float32",
        callback: Callback = ignore,
    ) -> TaskResult:
        """Learn the next task; or several at once, shuffled together.

        With `patience` the task's validation data decides: after so many epochs without a lower validation loss the
        step sizes are divided by `lr_divisor`, below `lr_min` learning stops, and the best weights are kept.
        `freeze_norms` leaves scale and shift of normalisation layers alone in every task but the first,
        `freeze_statistics` their running statistics. Both hold for the call that is given them: without, a later task
        learns them again (but those that a method's own settings freeze). With `precision="bfloat16"` the model
        multiplies in that while it learns, by torch's autocast, which is quicker where the processor knows it.

        A learner that was saved in the middle of a task (by `save`, called from `callback`) must be given the same task
        again, and goes on where it was.

        If learning fails, the task was never begun: its head, its place and its samples are given back, and it can be
        learnt again; only the weights stay where they have got to. A task gone on with after loading cannot be given
        back: load the file again. What `callback` or Ctrl-C breaks off has been learnt as far as it went, and is ended
        like any other task (the best weights, bases, penalties, exemplars) as soon as the learner is used again.
        """
        precision = asked_precision(precision, self.network.device)
        protocol = (
            epochs,
            batch_size,
            updates_per_batch,
            patience,
            lr_divisor,
            lr_min,
            freeze_norms,
            freeze_statistics,
            precision,
        )
        training = TrainingConfig(*protocol)
        check_precision(training.precision, self.network.dtype)
        return self._alone(lambda session: self._learn_or_give_back(as_task_list(tasks), training, callback, session))

    def _learn_or_give_back(
        self, listed: list[Task], training: TrainingConfig, callback: Callback, session: Session
    ) -> TaskResult:
        check_idle(self._fitting)
        interrupted = self._interrupted
        curriculum = TaskGroup(listed, self.num_tasks - (len(listed) if interrupted else 0))
        if interrupted:
            check_same(interrupted, curriculum, training)
        if training.patience:
            curriculum.require_validation()
        if self.settings.schedule != "sequential" and curriculum.first:
            raise UsageError(
                f"{type(self.settings).__name__} learns all tasks at once: give them to one call, "
                "learn([task, task, …]), and make a new Learner to learn them anew."
            )
        method = self.validate(curriculum.tasks)
        before, gone_on, stopped = self._before(), self.has_pending_task, False

        def tell(event: Event) -> None:
            nonlocal stopped
            stopped = True
            session.run_user_code(lambda: callback(event))
            stopped = False

        try:
            session.set_num_threads(
                self._workload.threads(probe_inputs(curriculum.tasks[0], self.network), training.batch_size)
            )
            return self._learn(method, curriculum, training, tell, session)
        except BaseException as error:
            on_purpose = stopped and not isinstance(error, DivergedError)  # and not because `save` found that
            if self._broken_off is not None and (on_purpose or not isinstance(error, Exception)):
                raise  # whoever did may want what has been learnt
            self._undo_task(before, gone_on, curriculum.name, error)
            told = diagnose(error, curriculum, self.network) if isinstance(error, Exception) else None
            if told is not None:
                raise told from error
            raise

    def _undo_task(self, before: State, gone_on: bool, name: str, error: BaseException) -> None:
        """Give back what a failed task took; where that cannot be, the learner is lost."""
        if before is not None:
            try:
                self._give_back(before)
            except Exception as failed:
                self._lost = f"a task failed, and what it took could not be given back ({one_line(failed)})"
                error.add_note(f"{self._lost[0].upper()}{self._lost[1:]}.")
        elif gone_on and self._interrupted is None:
            self._lost = f"the task {name!r} failed after it had been gone on with"
        self._broken_off = None

    def _learn(
        self, method: Method, curriculum: TaskGroup, training: TrainingConfig, callback: Callback, session: Session
    ) -> TaskResult:
        interrupted = self._interrupted
        self._at_rest, self._loaded = frozen_eval_layers(self.model), False
        if not interrupted:  # what is frozen in the middle of a task is part of the state
            self.network.freeze_norms(training.freeze_norms and curriculum.first > 0)
            self.network.freeze_statistics(training.freeze_statistics and curriculum.first > 0)
        fitting = TrainingLoop(method, self.network, curriculum, self._outputs, training, self.streams, callback)
        if self._workload.draws(method, curriculum.tasks):
            session.use_global_rng(GlobalRNG(self.network.device, self.streams))
        with training_context(self.network.device), self.network.mode(training=True):
            if interrupted:
                fitting.load_state_dict(interrupted)
            else:
                for task in curriculum.tasks:
                    self.network.add_head(task.head, self._outputs)
                self.num_tasks += len(curriculum.tasks)
                self._seek_chain(curriculum.tasks[0], curriculum.first)
                method.begin_task()
                check_last_batch(method, self.network, curriculum, training.batch_size)
            try:
                self._fitting, self._interrupted = fitting, None
                with self.network.autocast_to(training.precision):
                    fitting.run()
                self._fitting = None
                trained = fitting.time
                remarks = self._end_task(method, curriculum.name)
            except BaseException:
                self._interrupted = None
                self._broken_off = curriculum.name, fitting.best, torch.get_num_threads()
                raise
            finally:
                self._fitting = None
        seconds, cpu = split_wall_cpu({"train": trained, "memory": fitting.time.minus(trained)})
        return TaskResult(fitting.updates, seconds, method.memory_bytes(), remarks, method.diagnostics(), cpu)

    def _end_task(self, method: Method, name: str) -> list[str]:
        check_finite(self.network.trainable, f"after task {name!r}")
        drawn = self.streams.state_dict()
        try:
            remarks = method.end_task()
        except BaseException:
            self.streams.load_state_dict(drawn)  # ended later, it is to end in the same way
            raise
        if method.descent is not None:
            method.descent.restart()  # the momentum serves nobody any more, and would be kept and copied
        return remarks

    def _end_broken_off(self) -> None:
        """End the task that `callback` or Ctrl-C broke off, which would be forgotten like by a method that keeps nothing.
        Not at once: whoever breaks off may be in a hurry, and want nothing more of the learner.
        """
        if self._broken_off is None or self._method is None or self._fitting is not None:
            return
        name, best, threads = self._broken_off

        def end(method: Method, session: Session) -> None:
            session.use_global_rng(GlobalRNG(self.network.device, self.streams))
            session.set_num_threads(threads)
            with training_context(self.network.device), self.network.mode(training=True):
                if best:
                    self.network.restore(best)
                self._end_task(method, name)
            self._broken_off = None

        method = self._method
        self._alone(lambda session: end(method, session))

    def _seek_chain(self, task: Task, place: int) -> None:
        """Take gradients and outputs the quick way if the model, as it is now, is a chain of linear layers."""
        x, y = task.train.first()
        with torch.enable_grad():
            self.network.use_chain_if_exact(self.network.prepare(Batch(x, y, torch.full_like(y, place))))

    def evaluate(self, tasks: Task | Sequence[Task]) -> list[float]:
        """Test accuracy on each task, in percent; each sample is predicted within its task's head."""
        listed = as_task_list(tasks)

        def test() -> list[float]:
            return accuracies(listed, self.network, self._method, self._kind)

        tests = [task.test for task in listed if task.test is not None]
        return self._alone(lambda session: self._tested(test, tests[0].first()[0] if tests else None, listed, session))

    def predict(self, x: Tensor, head: range | None = None) -> Tensor:
        """The most likely output row of each sample, within the head if one is given, on the samples' own device. They
        are taken in batches, as in `evaluate`, so that there may be any number of them.
        """
        check_head(head)
        inputs = as_inputs(x)

        def predict() -> Tensor:
            return predictions(inputs, head, self.network, self._method, self._kind)

        first = inputs[: self.network.min_batch] if inputs.ndim > 1 else None
        return self._alone(lambda session: self._tested(predict, first, [], session, len(inputs) if inputs.ndim else 1))

    def _tested(
        self,
        work: Callable[[], _Result],
        first: Tensor | None,
        tasks: Sequence[Task],
        session: Session,
        count: int = BATCH,
    ) -> _Result:
        """Something that predicts, from inputs of which the first are given."""
        self._end_broken_off()
        if self._workload.draws(self._method, tasks):
            session.use_global_rng(GlobalRNG(self.network.device))
        if first is not None and len(first) > 0:
            session.set_num_threads(self._workload.threads(first, min(count, BATCH)))
        with torch.no_grad(), self.network.mode(training=False):
            return work()

    def _started(self, task: Task) -> tuple[Method, dict[str, bool]]:
        """The method, made when the first task shows what the model's input and head are, and the weights it covers."""
        covered: dict[str, ProjectedWeight] = {}
        if self.settings.uses_projection:
            prepared = self.network.prepare_inputs(probe_inputs(task, self.network))
            covered = coverage(self.network, prepared, self._exclude, multi_head=task.head is not None)
        method = self.settings.start(self.network, covered, self.streams)
        return method, {name: weight.factorable for name, weight in covered.items()}

    def validate(self, tasks: Task | Sequence[Task]) -> Method:
        """Refuse what the model and the method cannot learn, one after another or together, before anything is
        changed.
        """
        check_idle(self._fitting)
        return self._alone(lambda _: self._checked(as_task_list(tasks)))

    def _checked(self, listed: list[Task]) -> Method:
        self._check_whole()
        self._end_broken_off()
        begun = self.num_tasks > 0  # else nothing that was only looked at decides anything
        heads, kind, outputs = list(self.network.heads), self._kind if begun else None, self._outputs
        if self._interrupted:
            del heads[-len(listed) :]  # theirs, opened before they were broken off
        before = list(heads)
        self.network.input_copies.forget()
        # A model may draw even when it is only looked at.
        with neutral_autograd(self.network.device), preserve_global_rng(self.network.device):
            for task in listed:
                kind, outputs = validate_task(task, self.network, kind)
                self.settings.validate(task, heads)
                if self.settings.uses_projection:
                    warn_shared_head(task.name, task.head, before, self._outputs)
                heads.append(task.head)
                check_room(heads, outputs)
            check_unchanged(self.model, self.network.trainable, self.network.device)
            self._workload.count(probe_inputs(listed[0], self.network))
            if self._loaded:
                check_frozen_eval_layers(self._at_rest, self.model)
            multi_head = listed[0].head is not None
            other = self._multi_head == (not multi_head) or kind != self._kind
            if self._method is None or (other and not begun):
                method, covered = self._started(listed[0])
                self._seek_chain(listed[0], 0)
                self._method, self._covered, self._multi_head = method, covered, multi_head
        self._kind, self._outputs = kind, outputs
        return self._method

    def save(self, path: Path | str) -> None:
        """Write a file that `steppe.load` goes on from; between tasks, or from `callback` in the middle of one."""
        self._alone(lambda _: write_state(Path(path), "learner", self.state_dict()))

    def state_dict(self) -> State:
        """Model, method, streams and all else that learning depends on, as plain values and tensors."""
        if has_extra_state(self.model):
            raise ModelError(
                "the model has a state (get_extra_state) beside its weights and buffers, which would be lost: make it "
                "buffers."
            )
        self._check_whole()
        self._end_broken_off()
        during = None if self._fitting is None else f"in task {self._fitting.name!r}"
        check_finite(self.network.trainable, during or "since a task failed")
        return self._whole_state()
