"""What a learner consists of, how it is saved, and how it is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from steppe.checkpoint.tree import State, as_names, clone_tree
from steppe.data.padding import Padding
from steppe.data.task import Task
from steppe.errors import DivergedError, UsageError, one_line, short_repr
from steppe.fast.linear_hooks import may_factor
from steppe.learning.checks import (
    check_arguments,
    check_padding,
    check_state_matches,
    check_supported,
    check_trainable,
    check_uses_optimizer,
    choose_optimizer,
    has_extra_state,
    validate_exclude,
    validate_head,
)
from steppe.learning.events import Callback, Event
from steppe.learning.input_kind import Kind, kind_from_state, kind_to_state
from steppe.learning.phases import Broken, Idle, Interrupted, Learning, PendingEnd, Phase, Streaming
from steppe.learning.scoring import Metric, check_metric
from steppe.learning.task_checks import check_columns, check_loop_state, diagnose, probe_inputs
from steppe.learning.task_group import TaskGroup
from steppe.learning.workload import Workload, validate_threads
from steppe.methods.base import Method, MethodConfig, settings_of
from steppe.methods.parts.optimizer_descent import OptimizerDescent
from steppe.network.growing_head import GrowingHead, validate_grow
from steppe.network.heads import is_class_numbers
from steppe.network.network import Network
from steppe.network.optimizer_choice import OptimizerFactory, SchedulerFactory
from steppe.network.output_loss import Loss
from steppe.projection.coverage import find_covered_weights
from steppe.projection.layers import ProjectedWeight, projected_weights
from steppe.runtime.locks import FairLock
from steppe.runtime.rng import Streams, preserve_global_rng
from steppe.runtime.session import Session
from steppe.tensors.batch import Batch

_Result = TypeVar("_Result")


class UserCallback:
    """Calls the user's callback with the caller's generators, threads and signal handlers restored."""

    def __init__(self, callback: Callback, session: Session) -> None:
        self._callback, self._session = callback, session
        self.is_running = False
        """Whether it was called and has not returned: it is running, or has raised."""

    def __call__(self, event: Event) -> None:
        self.is_running = True
        self._session.run_user_code(lambda: self._callback(event))
        self.is_running = False


class LearnerBase:
    """The state of a learner; `learner.Learner` adds the methods that use it."""

    def __init__(
        self,
        model: nn.Module,
        method: MethodConfig | str,
        *,
        seed: int = 0,
        device: str | torch.device | None = None,
        input_transform: Callable[[Any], Any] | None = None,
        padding: Padding | None = None,
        exclude: Sequence[str] = (),
        head: str | None = None,
        grow: bool = False,
        threads: int | None = None,
        loss: Loss | None = None,
        metric: Metric | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        keep_optimizer_state: bool = False,
    ) -> None:
        check_arguments(model, seed, device, input_transform, exclude)
        method = settings_of(method)
        check_padding(padding)
        check_metric(metric)
        choice = choose_optimizer(optimizer, scheduler, keep_state=keep_optimizer_state)
        check_supported(method, loss=loss is not None, optimizer=choice is not None)
        chosen_threads = validate_threads(threads)
        self.model = model if device is None else model.to(device)
        self.settings = method
        self.streams = Streams(seed)
        self.network = Network(self.model, input_transform, padding, loss=loss, optimizer=choice)
        self.num_tasks = 0
        self.phase: Phase = Idle()
        self._exclude, self._head = validate_exclude(exclude, model), validate_head(head, model)
        self._growing = GrowingHead(model, str(head), self.streams) if validate_grow(grow, self._head) else None
        self._has_input_transform, self._metric = input_transform is not None, metric
        self._turn = FairLock()  # of the threads that use it
        self._workload = Workload(self.network, chosen_threads)
        # Decided by the first task:
        self._method: Method | None = None
        self._multi_head: bool | None = None
        self._input_kind: Kind | None = None
        self._num_outputs = self._outputs_needed = 0  # of the model; by the tasks that were validated last
        self._covered: dict[str, bool] = {}  # covered weights, and whether their gradients come as factors
        # Checked when a loaded learner is used again:
        self._eval_layers: list[str] | None = None  # frozen layers in eval mode when a task was last begun
        self._just_loaded = False

    def _run_exclusively(self, work: Callable[[Session], _Result]) -> _Result:
        """Run some work while no other thread uses the learner; see `runtime.session`."""
        session = Session(self.model, self._turn)
        return session.run(lambda: work(session))

    @property
    def has_pending_task(self) -> bool:
        """Whether it was loaded from a state saved within a task, which must be given to `learn` first."""
        return isinstance(self.phase, Interrupted)

    @property
    def is_saveable(self) -> bool:
        """Whether a file can hold all of it.

        The method must declare its `state_attrs`, and the model must have no state beside weights and buffers.
        """
        return (self._method is None or self._method.state_attrs is not None) and not has_extra_state(self.model)

    def load_state_dict(self, state: State) -> None:
        """Restore a state from `state_dict`.

        Args:
            state: The state of a learner with the same settings, seed and model.

        Raises:
            UsageError: Settings, seed, `exclude`, `head` or `input_transform` differ, or the learner is learning.
            ModelError: The model differs.
        """
        self._check_not_learning()
        check_state_matches(
            state,
            self.settings,
            self.streams.seed,
            self._exclude,
            self._head,
            has_input_transform=self._has_input_transform,
            padding=self.network.inputs.padding,
            grow=self._growing is not None,
            has_loss=not self.network.output_loss.is_cross_entropy,
        )
        with self._head_resized(state["network"]["weights"]):
            self.network.load_state_dict(state["network"], state["outputs"])
            check_trainable(as_names(state.get("trainable")), self.model)  # older states have no such entry
            self._restore(state)

    @contextmanager
    def _head_resized(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Give a growing head as many outputs as in saved weights; it gets its own number back if that fails."""
        if self._growing is None:
            yield
            return
        before, saved = self._growing.rows, [weights[name] for name in self._growing.parameters if name in weights]
        try:
            self._resize_head(len(saved[0]) if saved and saved[0].ndim else before)
            yield
        except BaseException:
            self._resize_head(before)
            raise

    def _resize_head(self, outputs: int) -> None:
        """Give a growing head this number of outputs, and the network what depends on it."""
        assert self._growing is not None
        self._growing.resize(outputs)
        self.network.fit_outputs(outputs)
        self._workload.forget()

    def _grow_head(self, task: Task) -> None:
        """Give the head as many outputs as a validated task needs, and the method what depends on it."""
        outputs = self._outputs_needed
        if self._growing is None or outputs <= self._growing.rows:
            return
        try:
            self._resize_and_inform(outputs)
        except BaseException:  # interrupted halfway: nothing may keep the old shape
            self._resize_and_inform(outputs)
            raise
        with torch.no_grad(), preserve_global_rng(self.network.device), self.network.mode(training=False):
            check_columns(
                self.network.forward(self.network.prepare_inputs(probe_inputs(task, self.network))), self._growing
            )

    def _resize_and_inform(self, outputs: int) -> None:
        assert self._growing is not None
        self._resize_head(outputs)
        self._num_outputs = outputs
        if self._method is not None:
            self._method.grow_head(self._growing)

    def _use_chain_if_exact(self, task: Task, number: int) -> None:
        x, y = task.train.first()
        if self._growing is not None and is_class_numbers(y):  # it may not have grown yet
            y = y.clamp(max=self._growing.rows - 1)
        with torch.enable_grad():
            self.network.use_chain_if_exact(self.network.prepare(Batch.of_task(x, y, number)))

    def _whole_state(self, *, without_method: bool = False) -> State:
        """The state, or only the part of it that the first task does not decide."""
        kind, method = (None, None) if without_method else (self._input_kind, self._method)
        return {
            "settings": {"kind": type(self.settings).__name__, "values": self.settings.as_dict()},
            "seed": self.streams.seed,
            "exclude": list(self._exclude),
            "head": self._head,
            "grow": self._growing is not None,
            "prepared": self._has_input_transform,
            "loss": not self.network.output_loss.is_cross_entropy,
            "optimizer": self._optimizer_name(method),
            "threads": self._workload.chosen,
            "tasks_learnt": self.num_tasks,
            "outputs": self._num_outputs,
            "inputs": kind_to_state(kind),
            "padding": None if (padding := self.network.inputs.padding) is None else padding.as_dict(),
            "trainable": list(self.network.trainable),
            "at_rest": self._eval_layers,
            "covered": {} if without_method else self._covered,
            "network": self.network.state_dict(),
            "method": None if method is None else method.state_dict(),
            "streams": self.streams.state_dict(),
            "fitting": self._loop_state(),
            "stream": self.phase.samples if isinstance(self.phase, Streaming) else None,
        }

    def _loop_state(self) -> State:
        match self.phase:
            case Learning(loop):
                return loop.state_dict()
            case Interrupted(loop_state):
                return loop_state
        return None

    def _restore(self, state: State) -> None:
        """Restore all but the network."""
        num_tasks, outputs, loop_state, covered = (
            state[name] for name in ("tasks_learnt", "outputs", "fitting", "covered")
        )
        check_loop_state(loop_state)
        streamed = state.get("stream")  # older states have no such entry
        if streamed is not None and (
            type(streamed) is not int or streamed < 0 or loop_state or state["method"] is None
        ):
            raise ValueError(f"invalid number of samples of a stream: {short_repr(streamed)}")
        kind = kind_from_state(state["inputs"])
        method: Method | None = None
        if state["method"] is not None:
            method = self.settings.start(self.network, self._find_covered(covered), self.streams)
            validation = loop_state and loop_state["validation"]
            for _ in range(validation["cuts"] if validation else 0):
                method.decay_lr(loop_state["training"]["lr_divisor"])
            method.load_state_dict(self._with_own_optimizer(method, state))
        self.streams.load_state_dict(state["streams"])  # last: creating the method may have drawn from them
        self._eval_layers, self._just_loaded = as_names(state.get("at_rest")), True
        self.num_tasks, self._num_outputs = num_tasks, outputs
        self._input_kind, self._covered, self._method = kind, covered, method
        self.phase = Interrupted(loop_state) if loop_state else Idle() if streamed is None else Streaming(streamed)

    def _optimizer_name(self, method: Method | None) -> str | None:
        """The class of the user's optimizer; None if there is none, or no method yet that uses it."""
        return method.descent.name if method is not None and isinstance(method.descent, OptimizerDescent) else None

    def _with_own_optimizer(self, method: Method, state: State) -> State:
        """The method's state, with a fresh one of the optimizer if it was saved between tasks with another."""
        saved, own = state.get("optimizer"), self._optimizer_name(method)  # older states have no such entry
        if saved == own:
            return state["method"]
        if state["fitting"] is not None:
            raise UsageError(
                f"the learner was saved within a task that was learned with {saved or 'the SGD of its method'}, but "
                f"this learner has {own or 'no optimizer of its own'}; resume that task with the same optimizer."
            )
        if own is None:
            raise UsageError(
                f"the learner was saved with the optimizer {saved}, which a file cannot hold; pass optimizer=..., the "
                "same or another one."
            )
        assert method.descent is not None
        return {**state["method"], "descent": method.descent.state_dict()}

    def _start_method(self, task: Task) -> tuple[Method, dict[str, bool]]:
        """Create the method, now that a task shows the model's inputs and head, and find the weights it covers."""
        covered: dict[str, ProjectedWeight] = {}
        if self.settings.uses_projection:
            prepared = self.network.prepare_inputs(probe_inputs(task, self.network))
            multi_head = task.head is not None
            covered = find_covered_weights(
                self.network, prepared, self._exclude, multi_head=multi_head, head=self._head
            )
        method = self.settings.start(self.network, covered, self.streams)
        check_uses_optimizer(method, self.network)
        return method, {name: weight.factorable for name, weight in covered.items()}

    def _find_covered(self, covered: Mapping[str, bool]) -> dict[str, ProjectedWeight]:
        """The weights that were covered when the method was first created."""
        if not covered:
            return {}
        weights = projected_weights(self.model, (*self._exclude, *([self._head] if self._head else [])))
        if not covered.keys() <= weights.keys():  # single-head learning covers the head too
            weights = projected_weights(self.model, self._exclude)
        return {
            # Older versions took the gradients of any linear layer as factors.
            name: replace(weights[name], factorable=factorable and all(map(may_factor, weights[name].layers)))
            for name, factorable in covered.items()
        }

    @contextmanager
    def _transaction(self, group: TaskGroup, callback: UserCallback) -> Iterator[None]:
        """Roll back a task that fails inside; if the user stops it, keep what was learned, to be ended later."""
        checkpoint, is_resumed = self._checkpoint(), self.has_pending_task
        try:
            yield
        except BaseException as error:
            # A divergence is not the user's doing, even where the callback's `save` discovers it.
            by_user = callback.is_running and not isinstance(error, DivergedError)
            if isinstance(self.phase, PendingEnd) and (by_user or not isinstance(error, Exception)):
                raise
            self._roll_back(checkpoint, is_resumed, group.name, error)
            explained = diagnose(error, group, self.network) if isinstance(error, Exception) else None
            if explained is not None:
                raise explained from error
            raise

    def _checkpoint(self) -> State:
        """Everything that learning a task changes; the weights only with a loss of the user's, which may return NaN.

        Returns:
            The state; None where it cannot be rolled back: within a task, or if the method does not declare its state.
        """
        first = self.num_tasks == 0  # a method that has not learned anything is created anew
        if self.has_pending_task or not (first or self._method is None or self._method.state_attrs is not None):
            return None
        state = self._whole_state(without_method=first)
        if self.network.output_loss.is_cross_entropy:
            state["network"]["weights"] = {}
        rows = None if self._growing is None else self._growing.rows
        return clone_tree(
            {**state, "loaded": self._just_loaded, "rows": rows}, "cpu"
        )  # a device may have no memory to spare

    def _roll_back(self, checkpoint: State, is_resumed: bool, name: str, error: BaseException) -> None:
        if checkpoint is not None:
            try:
                self._restore_checkpoint(checkpoint)
            except Exception as failure:
                reason = f"a task failed, and could not be rolled back ({one_line(failure)})"
                self.phase = Broken(reason)
                error.add_note(f"{reason[0].upper()}{reason[1:]}.")
        elif is_resumed and not self.has_pending_task:
            self.phase = Broken(f"the task {name!r} failed after it was resumed")
        if isinstance(self.phase, PendingEnd):
            self.phase = Idle()

    def _restore_checkpoint(self, checkpoint: State) -> None:
        device = self.network.device
        state = checkpoint if device.type == "cpu" else clone_tree(checkpoint, device)
        if state["rows"] is not None:
            self._resize_head(state["rows"])
        if not state["network"]["weights"]:
            state["network"]["weights"] = self.network.state_dict()["weights"]
        self.network.load_state_dict(state["network"], state["outputs"])
        self._restore(state)
        self._just_loaded = state["loaded"]

    def _check_not_learning(self) -> None:
        if isinstance(self.phase, Learning):
            raise UsageError(
                "the learner is learning a task; call `learn`, `validate` or `load_state_dict` after `learn` has "
                "returned, not from its callback or another thread. (Saving, predicting and evaluating are allowed.)"
            )

    def _check_not_broken(self) -> None:
        if isinstance(self.phase, Broken):
            raise UsageError(f"{self.phase.reason}; load a saved learner, or create a new one.")
