"""One run: learn the tasks in order, evaluate on all tasks seen after each one, record everything; resumable."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch

from steppe.checkpoint.tree import INVALID_STATE_ERRORS, State
from steppe.data.task import Task
from steppe.errors import RunError, UsageError, one_line
from steppe.experiments.config import RunConfig
from steppe.experiments.plugins import plugin_digests
from steppe.experiments.run_directory import RunDirectory, lock_directory, read_result, require_free
from steppe.fast.malloc import keep_freed_memory
from steppe.learning.accuracy_matrix import AccuracyMatrix
from steppe.learning.events import Callback, EpochEnded, Event, Progress, RunStarted, TaskEnded, ignore
from steppe.learning.learner import Learner
from steppe.learning.loop import TaskResult
from steppe.learning.task_group import TaskGroup
from steppe.results.file_names import CHECKPOINTS, CONFIG, REPORT, RESULT
from steppe.results.schema import RunResult, StageCost
from steppe.results.tables import run_report
from steppe.runtime.clocks import ZERO, Elapsed, Stopwatch, split_wall_cpu
from steppe.runtime.contexts import gc_frozen
from steppe.runtime.devices import make_deterministic, resolve_device
from steppe.runtime.environment import format_machine, machine_info, printable
from steppe.runtime.signals import StopCheck, never_stop
from steppe.runtime.warn import CautionWarning
from steppe.version import versions

CHECKPOINT_EVERY = 300.0
"""Seconds between checkpoints within a task; there is always one after each task."""

_KINDS = ("train", "evaluate", "memory")  # of seconds


def run(
    config: RunConfig,
    out: Path | None = None,
    callback: Callback = ignore,
    *,
    resume: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    stop: StopCheck = never_stop,
) -> RunResult:
    """Execute a run. All checks come before the first write.

    Args:
        config: The configuration.
        out: The run directory to write; None writes nothing.
        callback: Called with every event.
        resume: Resume the run in `out` from its last checkpoint, or return its result if it is finished. A resumed run
            gives the same result bit for bit; the number of threads may change, which the result then records.
        checkpoint_every: Seconds between checkpoints within a task.
        stop: Called regularly; if it returns an exception, the run saves a checkpoint and raises it.

    Returns:
        The result, as in result.json.

    Raises:
        UsageError: The configuration and the directory do not fit, or the method does not suit the benchmark.
        RunError: The directory cannot be read or written.

    Example:
        >>> import steppe.methods
        >>> config = RunConfig.make("pmnist", "finetune", ["tasks=2", "samples=20", "test_samples=20"])
        >>> result = run(config)
    """
    config = dataclasses.replace(config, device=resolve_device(config.device))
    if out is None:
        return _Run(config, None, callback, checkpoint_every, stop).result()
    if not resume:
        require_free(out)
    elif (out / CONFIG).exists():
        require_same_config(out, config)
    elif not (out / RESULT).exists():
        require_free(out)
    prepared = _Run(config, out, callback, checkpoint_every, stop)  # validates, before the directory is created
    with lock_directory(out):
        if not resume:
            require_free(out)  # again: another process may have been faster
        elif (out / RESULT).exists():
            return finalize_existing(out)
        return prepared.result()


def finalize_existing(out: Path) -> RunResult:
    """Return the existing result, and write the report if the run was killed before it could."""
    result = read_result(out)
    directory = RunDirectory(out)
    if not (out / REPORT).exists() or directory.states:
        directory.clean_up(run_report(result))
    return result


def require_same_config(out: Path, config: RunConfig) -> None:
    """Raise a UsageError if the run in this directory has different settings."""
    existing = RunConfig.load(out / CONFIG, config.plugins)
    if not config.matches(existing.as_dict()):
        raise different_settings(out)


def different_settings(out: Path) -> UsageError:
    """Build the error for a directory that contains a run with different settings."""
    return UsageError(f"{out} contains a run with different settings; choose another --out.")


class _Run:
    """The state of a run, and the loop over its tasks."""

    def __init__(
        self, config: RunConfig, out: Path | None, callback: Callback, checkpoint_every: float, stop: StopCheck
    ) -> None:
        self._config, self._out, self._callback, self._every, self._stop = config, out, callback, checkpoint_every, stop
        # Read now: the files may change during the run.
        self._versions = {**versions(), **plugin_digests(config.plugins)}
        torch.set_num_threads(config.threads)
        make_deterministic(config.device)
        keep_freed_memory()
        self._tasks = config.tasks()
        self._learner = _build_learner(config)
        _validate_run(config, self._learner, self._tasks)
        self._directory: RunDirectory | None = None
        self._kept_at = time.monotonic()
        self._stage = 0
        self._matrix = AccuracyMatrix()
        self._per_task: list[dict[str, Any]] = []
        self._remarks = [printable(remark) for remark in config.benchmark_settings.remarks()]
        self._resumable = self._learner.is_saveable
        self._notes: list[str] = []  # shown, but not part of the result
        self._epochs_before = 0  # of the task within which the run was resumed

    def result(self) -> RunResult:
        """Run to the end, from the start or from the last checkpoint."""
        if self._out is not None:
            state, remarks = RunDirectory(self._out).last_state([self._config], self._config.device)
            self._restore(state, remarks)
            self._directory = RunDirectory.create(self._out, self._config)
            self._directory.truncate_log(state)
        try:
            with gc_frozen():
                self._learn_tasks()
        except BaseException as error:
            if self._directory is not None:
                with suppress(RunError):  # a full disk may be what stopped the run
                    reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "interrupted"
                    self._directory.log({"event": "Stopped", "reason": reason})
            raise
        result = self._summed_up()
        if self._directory is not None:
            self._directory.finish(result, run_report(result))
        return result

    def _learn_tasks(self) -> None:
        config, tasks, training = self._config, self._tasks, self._config.training
        stages = _stages(config.method_settings.schedule, len(tasks))
        each = [training.epochs * (task.train.count_batches(training.batch_size) or 0) for task in tasks]
        lengths = [sum(each[stage.start : stage.stop]) for stage in stages]
        before = sum(lengths[: self._stage])
        if self._epochs_before:
            before += self._epochs_before * lengths[self._stage] // training.epochs
        self._emit(
            RunStarted(len(tasks), sum(lengths), [*self._remarks, *self._notes], before, list(accumulate(lengths)))
        )
        for number in range(self._stage, len(stages)):
            stage = stages[number]
            retrain = stage.start == 0 and number > 0
            if retrain and not self._learner.has_pending_task:
                self._learner = _build_learner(config)
            tested = self._evaluate_before_learning(number) if config.method_settings.schedule == "sequential" else ZERO
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CautionWarning)  # they are shown as remarks
                learned = self._learn(tasks[stage.start : stage.stop])
            clock = Stopwatch(tested)
            row = self._learner.evaluate(tasks[: stage.stop])
            self._matrix.append(row, num_tasks=stage.stop - len(self._matrix))
            seconds, cpu = split_wall_cpu({"evaluate": clock.elapsed})
            spent = {**learned.seconds, **seconds}
            cpu = {**learned.cpu_seconds, **cpu} if learned.cpu_seconds and cpu else {}
            own = {"seconds": spent, "bytes": learned.bytes, "updates": learned.updates}
            self._per_task.append({**own, "cpu_seconds": cpu} if cpu else own)
            self._stage = number + 1
            place = stage.stop - 1
            if self._directory is not None:
                self._directory.save_weights(self._learner.model, place)
            name = tasks[place].name
            ended = TaskEnded(
                place, name, row, spent, learned.bytes, learned.updates, learned.remarks, learned.diagnostics, cpu
            )
            self._emit(ended)

    def _learn(self, tasks: Sequence[Task]) -> TaskResult:
        return self._learner.learn(tasks, **self._config.training.as_dict(), callback=self._emit)  # type: ignore[arg-type]

    def _evaluate_before_learning(self, place: int) -> Elapsed:
        """Evaluate a task before it is learned (before the first one, all tasks) for forward transfer.

        Where the head grows, its classes cannot be predicted yet.

        Returns:
            The time it took. A resumed task was evaluated before it was interrupted.
        """
        clock = Stopwatch()
        if not self._learner.has_pending_task and self._config.benchmark_settings.growing_head is None:
            if place == 0:
                self._matrix.untrained = self._learner.evaluate(self._tasks)
            elif self._matrix.untrained and len(self._matrix.ahead) < place:
                self._matrix.ahead += self._learner.evaluate(self._tasks[place])
        return clock.elapsed

    def _emit(self, event: Event) -> None:
        """Log and show an event; save a checkpoint after each task, every so often within one, and before stopping."""
        if self._directory is not None and not isinstance(event, Progress):
            self._directory.log({"event": type(event).__name__, **dataclasses.asdict(event)})
        self._callback(event)
        stopped = self._stop()
        due = stopped is not None or time.monotonic() - self._kept_at >= self._every
        if isinstance(event, TaskEnded) or (due and isinstance(event, (Progress, EpochEnded))):
            self._save_state()
        if stopped is not None:
            raise stopped

    def _save_state(self) -> None:
        if self._directory is None or not self._resumable:
            return
        state = {
            "config": self._config.as_dict(),
            "versions": self._versions,
            "machine": machine_info(self._config.device),
            "stage": self._stage,
            "rows": [None if row is None else len(row) for row in self._matrix.rows],
            "accuracies": _flatten(self._matrix.rows),  # a compact tensor: a thousand tasks give half a million values
            "untrained": self._matrix.untrained,
            "ahead": self._matrix.ahead,
            "per_task": self._per_task,
            "remarks": self._remarks,
            "learner": self._learner.state_dict(),
        }
        self._directory.save_state(state)
        self._kept_at = time.monotonic()

    def _restore(self, state: State, remarks: Sequence[str]) -> None:
        """Load the checkpoint, if there is one."""
        self._notes = list(remarks)
        if not self._resumable:
            self._notes.append(
                f"{self._config.method}, or its network, cannot be saved: if interrupted, this run cannot be resumed."
            )
        if state is None:
            return
        try:
            self._load_state_dict(state)
        except INVALID_STATE_ERRORS as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            files = f"{self._out}/{CHECKPOINTS}/state-*"
            raise RunError(
                f"cannot resume from the last checkpoint ({reason}); remove {files} to start over."
            ) from error

    def _load_state_dict(self, state: State) -> None:
        stages = _stages(self._config.method_settings.schedule, len(self._tasks))
        self._stage, self._per_task = state["stage"], state["per_task"]
        self._remarks = [printable(remark) for remark in state["remarks"]]
        num_learned = stages[self._stage - 1].stop if self._stage > 0 else 0
        if not 0 <= self._stage == len(self._per_task) <= len(stages) or len(state["rows"]) != num_learned:
            raise ValueError(f"{self._stage} stages do not match {len(state['rows'])} rows of accuracies")
        for task in self._per_task:
            float(task["updates"]), dict(task["bytes"])
            _sums([task], "seconds"), "cpu_seconds" in task and _sums([task], "cpu_seconds")
        self._matrix.rows = _unflatten(state["rows"], state["accuracies"])
        for name in ("untrained", "ahead"):  # missing in older checkpoints
            setattr(self._matrix, name, [float(value) for value in state.get(name, [])])
        self._learner.load_state_dict(state["learner"])
        fitting = state["learner"]["fitting"]
        self._epochs_before = 0 if fitting is None else int(fitting["epoch"])
        within = ""
        if fitting is not None:  # after a task's last epoch there is no epoch to be in
            where = "at the end" if fitting["over"] else f"in epoch {self._epochs_before + 1}"
            within = f", {where} of {fitting['task']!r}"
        self._notes.append(f"resumed after {self._stage} of {len(self._tasks)} tasks{within}.")
        if state["versions"] != self._versions:
            listed = printable(", ".join(f"{name} {value}" for name, value in state["versions"].items()))
            self._remarks = [*self._remarks, f"the first part of the run used other versions: {listed}."]
        before, here = state.get("machine", {}), machine_info(self._config.device)  # missing in older checkpoints
        if any(before.get(name, here.get(name)) != here.get(name) for name in ("processor", "gpu", "system")):
            hardware = printable(format_machine(before))
            self._remarks = [*self._remarks, f"the first part of the run used another machine: {hardware}."]
        threads = int(state["config"]["run"]["threads"])
        if threads != self._config.threads:
            self._remarks = [*self._remarks, f"the first part of the run used --threads {threads}."]

    def _summed_up(self) -> RunResult:
        config, matrix, per_task = self._config, self._matrix, self._per_task
        timed = all("cpu_seconds" in task for task in per_task)  # not if an older version started the run
        return RunResult(
            benchmark=config.benchmark,
            method=config.method,
            seed=config.seed,
            schedule=config.method_settings.schedule,
            acc=matrix.acc,
            bwt=matrix.bwt,
            learning_acc=matrix.learning_acc,
            forgetting=matrix.forgetting,
            forward_transfer=matrix.forward_transfer,
            accuracy=matrix.square(),
            untrained=matrix.untrained,
            ahead=matrix.ahead,
            updates=sum(task["updates"] for task in per_task),
            seconds=_sums(per_task, "seconds"),
            cpu_seconds=_sums(per_task, "cpu_seconds") if timed else None,
            bytes=per_task[-1]["bytes"],
            working=list(config.method_settings.working_memory),
            per_task=[StageCost.from_dict(task) for task in per_task],
            is_canonical=config.is_canonical and len(self._tasks) >= getattr(config.benchmark_settings, "tasks", 0),
            remarks=self._remarks,
            command=config.command(),
            versions=self._versions,
            machine=machine_info(config.device),
            config=config.as_dict(),
        )


def _sums(per_task: Sequence[dict[str, Any]], measure: str) -> dict[str, float]:
    """Sum the seconds of all tasks, by kind."""
    return {kind: float(sum(task[measure][kind] for task in per_task)) for kind in _KINDS}


def _flatten(rows: Sequence[Sequence[float] | None]) -> torch.Tensor:
    values = [value for row in rows if row is not None for value in row]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _unflatten(lengths: Sequence[int | None], values: torch.Tensor) -> list[list[float] | None]:
    left = iter(values.tolist())
    return [None if length is None else list(islice(left, length)) for length in lengths]


def validate_configs(configs: Sequence[RunConfig]) -> None:
    """Check, before any work, that the methods suit their benchmark and that the device is available.

    Args:
        configs: Configurations that share a benchmark.

    Raises:
        UsageError, ModelError, DataError: A configuration cannot run.
    """
    tasks = configs[0].tasks()
    for config in configs:
        resolve_device(config.device)
        on_cpu = dataclasses.replace(config, device="cpu")  # this process should not use GPU memory
        _validate_run(config, _build_learner(on_cpu), tasks)


def _validate_run(config: RunConfig, learner: Learner, tasks: Sequence[Task]) -> None:
    learner.validate(tasks)
    if config.training.patience:
        TaskGroup(tasks, 0).require_validation()


def _build_learner(config: RunConfig) -> Learner:
    model = config.benchmark_settings.model(config.seed)
    benchmark = config.benchmark_settings
    return Learner(
        model,
        config.method_settings,
        seed=config.seed,
        device=config.device,
        input_transform=benchmark.input_transform,
        head=benchmark.growing_head,
        grow=benchmark.growing_head is not None,
        threads=config.threads,
    )


def _stages(schedule: str, tasks: int) -> list[range]:
    """Return the tasks learned together at each stage."""
    if schedule == "joint":
        return [range(tasks)]
    if schedule == "retrain":
        return [range(place + 1) for place in range(tasks)]
    return [range(place, place + 1) for place in range(tasks)]
