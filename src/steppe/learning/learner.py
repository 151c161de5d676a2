"""The library's front door: a model, a method, and one task after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch

from steppe.checkpoint.io import write_state
from steppe.checkpoint.tree import State
from steppe.data.task import Task
from steppe.errors import ModelError, UsageError
from steppe.learning.checks import (
    check_finite,
    check_frozen_eval_layers,
    check_precision,
    check_schedule,
    check_unchanged,
    choose_precision,
    frozen_eval_layers,
    has_extra_state,
)
from steppe.learning.events import Callback, ignore
from steppe.learning.learner_base import UserCallback
from steppe.learning.loop import TaskResult, TrainingLoop
from steppe.learning.phases import Idle, Interrupted, Learning, PendingEnd
from steppe.learning.stream_learner import StreamLearner
from steppe.learning.task_checks import as_task_list, check_last_batch, check_same_task, probe_inputs, validate_task
from steppe.learning.task_group import TaskGroup
from steppe.methods.base import Method
from steppe.network.heads import check_mask_size
from steppe.projection.coverage import warn_shared_head
from steppe.runtime.clocks import split_wall_cpu
from steppe.runtime.contexts import neutral_autograd, training_context
from steppe.runtime.rng import GlobalRNG, preserve_global_rng
from steppe.runtime.session import Session
from steppe.runtime.warn import warn_of
from steppe.settings import TrainingConfig

_Result = TypeVar("_Result")


class Learner(StreamLearner):
    """A PyTorch model that learns tasks one after another with a continual-learning method.

    The model is used in place: `learn` changes its weights and leaves nothing else behind (no hooks, no change of
    mode). Learners may be used from several threads, and several may work at once.

    Args:
        model: Any module that returns one row of logits per sample, (n, outputs): as a tensor, as the first part of a
            tuple, or as `logits` of an object or dictionary. With `loss`, any tensor (n, ...).
        method: The method's settings, such as `steppe.FSDGPM()`, or its name, such as `"fs-sgpm"`.
        seed: Decides the order of batches, replay, and dropout. Initialize the model before, with `torch.manual_seed`.
        device: Where to move the model; by default it stays where it is.
        input_transform: Turns stored inputs, batch by batch and on the model's device, into the model's inputs: a
            tensor, dictionary or tuple into the same or another of them, in new tensors. By default bytes are scaled to
            0…1 and other numbers are kept.
        padding: How sequences of different lengths are padded, batch by batch; a file keeps it.
        exclude: Names of layers or weights that a gradient memory must not project.
        head: Name of the output layer, or of its weight. In multi-head learning (tasks with `head=range(...)`) it is
            trained without projection; by default it is detected. Single-head learning projects it like all others.
        grow: Whether the layer `head`, a `torch.nn.Linear`, gets more outputs when a task has labels or a head beyond
            them. What was learned stays as it is. The initial values of new outputs depend on `seed`
            (docs/scenarios.md).
        threads: How many threads torch uses while learning and testing. By default one where a batch is little work,
            otherwise as many as torch is set to (docs/reliability.md).
        loss: A function of output and target that returns the mean loss; by default cross-entropy. Targets may then be
            anything. It sees a batch together with its replayed samples; within a head it sees the head's columns, and
            class numbers counted from its first (docs/recipes/own-loss.md).
        metric: What `evaluate` measures: a function of output and target that returns a mean over the samples, or an
            object with `reset`, `update` and `compute` like those of torchmetrics. By default accuracy in percent.
        optimizer: A function that makes an optimizer of the model's trainable parameters, such as
            `lambda params: torch.optim.AdamW(params, lr=1e-3)`. It takes the steps in place of the method's SGD, whose
            lr and momentum have no effect then. It is called for every task (docs/recipes/own-loss.md).
        scheduler: A function that makes a scheduler of the optimizer. It steps after every update.
        keep_optimizer_state: Carry the optimizer's moments over to the next task instead of starting anew.

    Attributes:
        model: The model, in place.
        num_tasks: How many tasks it has begun to learn.
        phase: What it is doing; see `steppe.learning.phases`.

    Raises:
        UsageError: An argument is invalid.
        ModelError: The model cannot be trained.

    Example:
        >>> import torch, steppe
        >>> x, y = torch.rand(40, 8), torch.arange(40) % 2
        >>> learner = steppe.Learner(torch.nn.Linear(8, 4), steppe.ER(), head="weight")
        >>> for first in (0, 2):
        ...     data = x + first, y + first
        ...     result = learner.learn(steppe.Task(data, data, head=range(first, first + 2)), epochs=2)
        >>> learner.num_tasks, result.updates
        (2, 8)
        >>> learner.predict(x[:5], head=range(2)).shape
        torch.Size([5])
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
        """Learn the next task.

        If learning fails, the task is rolled back and can be learned again; only the weights stay as they are, unless
        the learner has its own loss. If `callback` or Ctrl-C stops it, what was learned is kept, and the task is ended
        like any other (best weights, bases, exemplars) when the learner is next used. A task that fails after it was
        resumed from a file cannot be rolled back: load the file again.

        Args:
            tasks: The next task, or several to learn at once, shuffled together. A learner loaded from a file that was
                saved within a task must be given that task again, and resumes it.
            epochs: Passes over the training samples; the upper limit if `patience` is set.
            batch_size: Samples of the current task per batch.
            updates_per_batch: Updates made on each batch before the next one.
            patience: Epochs without a lower validation loss before the learning rates are divided by `lr_divisor`. The
                best weights are kept in the end. 0 turns validation off; otherwise the task needs `val`.
            lr_divisor: What to divide the learning rates by, with `patience`.
            lr_min: The task ends when a learning rate falls below this, with `patience`.
            freeze_norms: Leave scale and shift of normalization layers unchanged in this call, but in the first task.
            freeze_statistics: Let BatchNorm use its running statistics unchanged in this call, but in the first task.
            precision: "float32", or "bfloat16" to train under torch's autocast, which is faster on hardware that
                supports it. Weights, evaluation and validation stay in float32.
            callback: Called with `steppe.Progress` and `steppe.EpochEnded` records. It may evaluate, predict and save,
                and it may raise to stop the task.

        Returns:
            Updates, seconds, memory in bytes, remarks and the method's diagnostics.

        Raises:
            UsageError: An argument is invalid, or the learner cannot learn this now.
            DataError: The task's data cannot be learned.
            ModelError: The model does not fit the method.
            DivergedError: A loss or a weight is no longer finite.
        """
        config = TrainingConfig(
            epochs,
            batch_size,
            updates_per_batch,
            patience,
            lr_divisor,
            lr_min,
            freeze_norms,
            freeze_statistics,
            choose_precision(precision, self.network.device),
        )
        check_precision(config.precision, self.network.dtype)
        result = self._run_exclusively(
            lambda session: self._learn_tasks(as_task_list(tasks), config, callback, session)
        )
        warn_of(result.remarks)
        return result

    def _learn_tasks(
        self, tasks: list[Task], config: TrainingConfig, callback: Callback, session: Session
    ) -> TaskResult:
        self._check_not_learning()
        group = TaskGroup(tasks, self.num_tasks - (len(tasks) if self.has_pending_task else 0))
        if isinstance(self.phase, Interrupted):
            check_same_task(self.phase.loop_state, group, config)
        group.require_mixable()
        if config.patience:
            check_schedule(self.network)
            group.require_validation()
        if self.settings.schedule != "sequential" and group.first:
            raise UsageError(
                f"{type(self.settings).__name__} learns all tasks at once; pass them to one call, "
                "learn([task, task, …]), or create a new Learner to learn again."
            )
        method = self.validate(group.tasks)
        self.update_memory()  # with what came before from a stream
        guarded = UserCallback(callback, session)
        with self._transaction(group, guarded):
            first = probe_inputs(tasks[0], self.network)
            session.set_num_threads(self._workload.threads(first, config.batch_size))
            with training_context(self.network.device):
                self._grow_head(group.tasks[0])
            session.set_num_threads(self._workload.threads(first, config.batch_size))  # of the model as it is now
            return self._learn(method, group, config, guarded, session)

    def _learn(
        self, method: Method, group: TaskGroup, config: TrainingConfig, callback: Callback, session: Session
    ) -> TaskResult:
        self._eval_layers, self._just_loaded = frozen_eval_layers(self.model), False
        if not self.has_pending_task:  # else what is frozen is part of the state
            self.network.weights.freeze_norms(config.freeze_norms and group.first > 0)
            self.network.weights.freeze_statistics(config.freeze_statistics and group.first > 0)
        classes = self._num_outputs if self.network.output_loss.is_cross_entropy else None
        loop = TrainingLoop(method, self.network, group, classes, config, self.streams, callback)
        if self._workload.draws(method, group.tasks):
            session.use_global_rng(GlobalRNG(self.network.device, self.streams))
        with training_context(self.network.device), self.network.mode(training=True):
            if isinstance(self.phase, Interrupted):
                loop.load_state_dict(self.phase.loop_state)
            else:
                self._begin_tasks(method, group, config)
            try:
                self.phase = Learning(loop)
                with self.network.autocast_to(config.precision):
                    loop.run()
                training_time = loop.time
                remarks = self._end_task(method, group.name)
                self.phase = Idle()
            except BaseException:
                self.phase = PendingEnd(group.name, loop.best, torch.get_num_threads())
                raise
        seconds, cpu = split_wall_cpu({"train": training_time, "memory": loop.time.minus(training_time)})
        held, working = method.memory_bytes(), self.settings.working_memory
        return TaskResult(loop.updates, seconds, held, remarks, method.diagnostics(), cpu, working)

    def _begin_tasks(self, method: Method, group: TaskGroup, config: TrainingConfig) -> None:
        for task in group.tasks:
            self.network.heads.add(task.head, self._num_outputs)
        self.num_tasks += len(group.tasks)
        self._use_chain_if_exact(group.tasks[0], group.first)
        method.begin_task()
        check_last_batch(method, self.network, group, config.batch_size)

    def validate(self, tasks: Task | Sequence[Task]) -> Method:
        """Check that the model and the method can learn these tasks, without learning them.

        Args:
            tasks: One task, or several to be learned one after another or together.

        Returns:
            The running method.

        Raises:
            UsageError: The method cannot learn the tasks, or the learner is learning.
            DataError: The data does not fit the model.
            ModelError: The model does not fit the method.
        """
        self._check_not_learning()
        return self._run_exclusively(lambda _: self._validate(as_task_list(tasks)))

    def _validate(self, tasks: list[Task]) -> Method:
        self._check_not_broken()
        self._end_pending_task()
        begun = self.num_tasks > 0  # before that, tasks that were only validated decide nothing
        kind, outputs = self._input_kind if begun else None, 0
        heads = list(self.network.heads.ranges)
        if self.has_pending_task:
            del heads[-len(tasks) :]  # those of the tasks to resume
        earlier = list(heads)
        self.network.input_copies.forget()
        with neutral_autograd(self.network.device), preserve_global_rng(self.network.device):  # forwards may draw
            for task in tasks:
                kind, needed = validate_task(task, self.network, kind, self._growing)
                outputs = max(outputs, needed)
                self.settings.validate(task, heads)
                if self.settings.uses_projection:
                    warn_shared_head(task.name, task.head, earlier, self._num_outputs)
                heads.append(task.head)
                check_mask_size(heads, outputs)
            check_unchanged(self.model, self.network.trainable, self.network.device)
            self._workload.count(probe_inputs(tasks[0], self.network))
            if self._just_loaded:
                check_frozen_eval_layers(self._eval_layers, self.model)
            multi_head = tasks[0].head is not None
            differs = self._multi_head == (not multi_head) or kind != self._input_kind
            if self._method is None or (differs and not begun):
                method, covered = self._start_method(tasks[0])
                self._use_chain_if_exact(tasks[0], 0)
                self._method, self._covered, self._multi_head = method, covered, multi_head
        self._input_kind, self._outputs_needed = kind, outputs
        self._num_outputs = outputs if self._growing is None else self._growing.rows
        return self._method

    def save(self, path: Path | str, *, working_memory: bool = True) -> None:
        """Write a file that `steppe.load` resumes from.

        Args:
            path: The file to write; an existing one is replaced. May be called between tasks, or from `callback`.
            working_memory: Whether to write what can be rebuilt from the rest, such as FS-DGPM's bases. Without it the
                file is smaller, and `steppe.load` rebuilds it to the same bits on the same kind of machine. It is
                written in any case within a task, and if the weights were changed since the last one.

        Raises:
            RunError: The file cannot be written.
            UsageError: The method does not declare its state.
            ModelError: The model has a state that a file cannot hold.
        """
        self._run_exclusively(
            lambda _: write_state(Path(path), "learner", self.state_dict(working_memory=working_memory))
        )

    def state_dict(self, *, working_memory: bool = True) -> State:
        """Return model, method, random streams and all else that learning depends on, as plain values and tensors.

        Args:
            working_memory: As in `save`.

        Returns:
            The state.

        Raises:
            UsageError: The method does not declare its state.
            ModelError: The model has a state that a file cannot hold.
        """
        if has_extra_state(self.model):
            raise ModelError(
                "the model has extra state (get_extra_state) beside its weights and buffers, which would be lost; "
                "store it in buffers."
            )
        self._check_not_broken()
        self._end_pending_task()
        during = f"in task {self.phase.loop.name!r}" if isinstance(self.phase, Learning) else "since a task failed"
        check_finite(self.network.trainable, during)
        return self._whole_state() if working_memory else self._reduced_state()
