"""One run: tasks in order, each learnt, every one seen so far tested, everything recorded; resumed if it broke off."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch

from steppe.checkpoint.tree import INVALID_STATE_ERRORS, State
from steppe.data.task import Task
from steppe.errors import RunError, UsageError, one_line
from steppe.experiments.config import RunConfig, same_experiment
from steppe.experiments.plugins import digests
from steppe.experiments.run_directory import RunDirectory, locked, read_result, require_free
from steppe.learning.events import Callback, EpochEnded, Event, Progress, RunStarted, TaskEnded, ignore
from steppe.learning.learner import Learner
from steppe.learning.metrics import AccuracyMatrix
from steppe.learning.task_group import TaskGroup
from steppe.results.layout import CHECKPOINTS, CONFIG, REPORT, RESULT
from steppe.results.tables import run_report
from steppe.runtime.clocks import ZERO, Elapsed, Stopwatch, split_wall_cpu
from steppe.runtime.contexts import gc_frozen
from steppe.runtime.devices import make_deterministic, resolve_device
from steppe.runtime.environment import format_machine, machine_info, printable
from steppe.runtime.malloc import keep_freed_memory
from steppe.runtime.signals import StopCheck, never_stop
from steppe.version import versions

CHECKPOINT_EVERY = 300.0
"""Seconds of a task after which a state is kept, so that a run can be resumed; one is kept after every task anyway."""

_KINDS = ("train", "evaluate", "memory")  # of seconds


def run(
    config: RunConfig,
    out: Path | None = None,
    callback: Callback = ignore,
    *,
    resume: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    stop: StopCheck = never_stop,
) -> dict[str, Any]:
    """Do the run and give its result; with `out`, leave a run directory there.

    With `resume` a run that is there already is gone on with, from the last state it kept, to the result it would have
    had, or with another number of threads, which the result then says; one that is finished is left as it is. Where
    `stop` asks for it the run keeps its state and stops.
    Everything that can be refused is refused before anything is written.
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
    prepared = _Run(
        config, out, callback, checkpoint_every, stop
    )  # refuses what cannot be, before the directory is made
    with locked(out):
        if not resume:
            require_free(out)  # by a process that was quicker
        elif (out / RESULT).exists():
            return finalize_existing(out)
        return prepared.result()


def finalize_existing(out: Path) -> dict[str, Any]:
    """A result that is there; what should come after it is made up for, if the run was killed in between."""
    result = read_result(out)
    directory = RunDirectory(out)
    if not (out / REPORT).exists() or directory.states:
        directory.tidy(run_report(result))
    return result


def require_same_config(out: Path, config: RunConfig) -> None:
    """Refuse to go on with a run that has other settings."""
    there = RunConfig.load(out / CONFIG, config.plugins)
    if not same_experiment(there.as_dict(), config.as_dict()):
        raise UsageError(f"{out} holds a run with other settings: choose another --out.")


class _Run:
    """One run: where it stands, and its way to the result."""

    def __init__(
        self, config: RunConfig, out: Path | None, callback: Callback, checkpoint_every: float, stop: StopCheck
    ) -> None:
        self._config, self._out, self._callback, self._every, self._stop = config, out, callback, checkpoint_every, stop
        # Those of the code that runs, whatever happens to its files meanwhile.
        self._versions = {**versions(), **digests(config.plugins)}
        torch.set_num_threads(config.threads)
        make_deterministic(config.device)
        keep_freed_memory()
        self._tasks = config.benchmark_settings.stream(config.seed)
        self._learner = _learner(config)
        _check(config, self._learner, self._tasks)
        self._directory: RunDirectory | None = None
        self._kept_at = time.monotonic()
        self._stage = 0
        self._matrix = AccuracyMatrix()
        self._per_task: list[dict[str, Any]] = []
        self._remarks = [printable(remark) for remark in config.benchmark_settings.remarks()]
        self._resumable = self._learner.is_saveable
        self._told: list[str] = []  # remarks for whoever watches, which are not the result's
        self._epochs_before = 0  # of the task in whose middle the run was resumed

    def result(self) -> dict[str, Any]:
        """Go to the end, from the start or from where the directory's last state stands."""
        if self._out is not None:
            state, remarks = RunDirectory(self._out).last_state([self._config], self._config.device)
            self._go_back_to(state, remarks)
            self._directory = RunDirectory.create(self._out, self._config)
            self._directory.cut_log(state)
        try:
            with gc_frozen():
                self._learn_in_order()
        except BaseException as error:
            if self._directory is not None:
                with suppress(RunError):  # the disk may be what stopped the run
                    reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "interrupted"
                    self._directory.log({"event": "Stopped", "reason": reason})
            raise
        result = self._summed_up()
        if self._directory is not None:
            self._directory.finish(result, run_report(result))
        return result

    def _learn_in_order(self) -> None:
        config, tasks, training = self._config, self._tasks, self._config.training
        stages = _stages(config.method_settings.schedule, len(tasks))
        each = [training.epochs * task.train.count_batches(training.batch_size) for task in tasks]
        lengths = [sum(each[stage.start : stage.stop]) for stage in stages]
        before = sum(lengths[: self._stage])
        if self._epochs_before:
            before += self._epochs_before * lengths[self._stage] // training.epochs
        self._tell(
            RunStarted(len(tasks), sum(lengths), [*self._remarks, *self._told], before, list(accumulate(lengths)))
        )
        for number in range(self._stage, len(stages)):
            stage = stages[number]
            if (
                stage.start == 0 and number > 0 and not self._learner.has_pending_task
            ):  # everything so far from the start
                self._learner = _learner(config)
            tested = self._test_ahead(number) if config.method_settings.schedule == "sequential" else ZERO
            learnt = self._learner.learn(tasks[stage.start : stage.stop], **training.as_dict(), callback=self._tell)  # type: ignore[arg-type]
            clock = Stopwatch(tested)
            row = self._learner.evaluate(tasks[: stage.stop])
            self._matrix.append(row, learnt=stage.stop - len(self._matrix))
            seconds, cpu = split_wall_cpu({"evaluate": clock.elapsed})
            spent = {**learnt.seconds, **seconds}
            cpu = {**learnt.cpu_seconds, **cpu} if learnt.cpu_seconds and cpu else {}
            own = {"seconds": spent, "bytes": learnt.bytes, "updates": learnt.updates}
            self._per_task.append({**own, "cpu_seconds": cpu} if cpu else own)
            self._stage = number + 1
            place = stage.stop - 1
            if self._directory is not None:
                self._directory.save_weights(self._learner.model, place)
            name = tasks[place].name
            ended = TaskEnded(
                place, name, row, spent, learnt.bytes, learnt.updates, learnt.remarks, learnt.diagnostics, cpu
            )
            self._tell(ended)

    def _test_ahead(self, place: int) -> Elapsed:
        """Test the task at this place before it is learnt, and before the first one all of them, for forward transfer;
        returns the time it took. In the middle of a task it was done before.
        """
        clock = Stopwatch()
        if not self._learner.has_pending_task:
            if place == 0:
                self._matrix.untrained = self._learner.evaluate(self._tasks)
            elif self._matrix.untrained and len(self._matrix.ahead) < place:
                self._matrix.ahead += self._learner.evaluate(self._tasks[place])
        return clock.elapsed

    def _tell(self, event: Event) -> None:
        """Log and show what happened; keep a state after every task, within one every so often, and before a stop."""
        if self._directory is not None and not isinstance(event, Progress):
            self._directory.log({"event": type(event).__name__, **dataclasses.asdict(event)})
        self._callback(event)
        stopped = self._stop()
        due = stopped is not None or time.monotonic() - self._kept_at >= self._every
        if isinstance(event, TaskEnded) or (due and isinstance(event, (Progress, EpochEnded))):
            self._keep()
        if stopped is not None:
            raise stopped

    def _keep(self) -> None:
        if self._directory is None or not self._resumable:
            return
        state = {
            "config": self._config.as_dict(),
            "versions": self._versions,
            "machine": machine_info(self._config.device),
            "stage": self._stage,
            "rows": [None if row is None else len(row) for row in self._matrix.rows],
            "accuracies": _in_a_row(self._matrix.rows),  # half a million after a thousand tasks: a tensor is compact
            "untrained": self._matrix.untrained,
            "ahead": self._matrix.ahead,
            "per_task": self._per_task,
            "remarks": self._remarks,
            "learner": self._learner.state_dict(),
        }
        self._directory.save_state(state)
        self._kept_at = time.monotonic()

    def _go_back_to(self, state: State, remarks: Sequence[str]) -> None:
        """Stand where the state stands; without one, at the start."""
        self._told = list(remarks)
        if not self._resumable:
            self._told.append(f"{self._config.method}, or its network, cannot be kept: if the run stops, it is lost.")
        if state is None:
            return
        try:
            self._load_state_dict(state)
        except INVALID_STATE_ERRORS as error:
            told = f"{type(error).__name__}: {one_line(error)}"
            where = f"{self._out}/{CHECKPOINTS}/state-*"
            raise RunError(
                f"the run cannot go on from its last state ({told}): remove {where} to begin anew."
            ) from error

    def _load_state_dict(self, state: State) -> None:
        stages = _stages(self._config.method_settings.schedule, len(self._tasks))
        self._stage, self._per_task = state["stage"], state["per_task"]
        self._remarks = [printable(remark) for remark in state["remarks"]]
        learnt = stages[self._stage - 1].stop if self._stage > 0 else 0
        if not 0 <= self._stage == len(self._per_task) <= len(stages) or len(state["rows"]) != learnt:
            raise ValueError(f"{self._stage} stages with {len(state['rows'])} rows of accuracies cannot be")
        for task in self._per_task:
            float(task["updates"]), dict(task["bytes"])
            _sums([task], "seconds"), "cpu_seconds" in task and _sums([task], "cpu_seconds")
        self._matrix.rows = _in_rows(state["rows"], state["accuracies"])
        for name in ("untrained", "ahead"):  # states of older versions have none
            setattr(self._matrix, name, [float(value) for value in state.get(name, [])])
        self._learner.load_state_dict(state["learner"])
        fitting = state["learner"]["fitting"]
        self._epochs_before = 0 if fitting is None else int(fitting["epoch"])
        within = ""
        if fitting is not None:  # when a task's last epoch has ended, there is no next one that it could be in
            where = "at the end" if fitting["over"] else f"in epoch {self._epochs_before + 1}"
            within = f", {where} of {fitting['task']!r}"
        self._told.append(f"resumed after {self._stage} of {len(self._tasks)} tasks{within}.")
        if state["versions"] != self._versions:
            told = printable(", ".join(f"{name} {value}" for name, value in state["versions"].items()))
            self._remarks = [*self._remarks, f"the first part of the run was done with other versions: {told}."]
        before, here = state.get("machine", {}), machine_info(self._config.device)  # states of older versions have none
        if any(before.get(name, here.get(name)) != here.get(name) for name in ("processor", "gpu", "system")):
            told = printable(format_machine(before))
            self._remarks = [*self._remarks, f"the first part of the run was done elsewhere: {told}."]
        threads = int(state["config"]["run"]["threads"])
        if threads != self._config.threads:
            self._remarks = [*self._remarks, f"the first part of the run was done with --threads {threads}."]

    def _summed_up(self) -> dict[str, Any]:
        config, matrix, per_task = self._config, self._matrix, self._per_task
        timed = all("cpu_seconds" in task for task in per_task)  # not what an older version has begun
        return {
            "benchmark": config.benchmark,
            "method": config.method,
            "seed": config.seed,
            "schedule": config.method_settings.schedule,
            "acc": matrix.acc,
            "bwt": matrix.bwt,
            "learning_acc": matrix.learning_acc,
            "forgetting": matrix.forgetting,
            "forward_transfer": matrix.forward_transfer,
            "accuracy": matrix.square(),
            "untrained": matrix.untrained,
            "ahead": matrix.ahead,
            "updates": sum(task["updates"] for task in per_task),
            "seconds": _sums(per_task, "seconds"),
            **({"cpu_seconds": _sums(per_task, "cpu_seconds")} if timed else {}),
            "bytes": per_task[-1]["bytes"],
            "per_task": per_task,
            "full_length": config.is_canonical and len(self._tasks) >= getattr(config.benchmark_settings, "tasks", 0),
            "remarks": self._remarks,
            "command": config.command(),
            "versions": self._versions,
            "machine": machine_info(config.device),
            "config": config.as_dict(),
        }


def _sums(per_task: Sequence[dict[str, Any]], measure: str) -> dict[str, float]:
    """Seconds of all tasks by kind."""
    return {kind: float(sum(task[measure][kind] for task in per_task)) for kind in _KINDS}


def _in_a_row(rows: Sequence[Sequence[float] | None]) -> torch.Tensor:
    values = [value for row in rows if row is not None for value in row]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _in_rows(lengths: Sequence[int | None], values: torch.Tensor) -> list[list[float] | None]:
    left = iter(values.tolist())
    return [None if length is None else list(islice(left, length)) for length in lengths]


def refuse_unsuitable(configs: Sequence[RunConfig]) -> None:
    """Refuse methods that cannot serve their benchmark, all the same one, and a device that is not there, before any
    work.
    """
    tasks = configs[0].benchmark_settings.stream(configs[0].seed)
    for config in configs:
        resolve_device(config.device)
        _check(
            config, _learner(dataclasses.replace(config, device="cpu")), tasks
        )  # this process needs no memory of a GPU


def _check(config: RunConfig, learner: Learner, tasks: Sequence[Task]) -> None:
    learner.validate(tasks)
    if config.training.patience:
        TaskGroup(tasks, 0).require_validation()


def _learner(config: RunConfig) -> Learner:
    model = config.benchmark_settings.model(config.seed)
    benchmark = config.benchmark_settings
    return Learner(
        model,
        config.method_settings,
        seed=config.seed,
        device=config.device,
        input_transform=benchmark.input_transform,
        threads=config.threads,
    )


def _stages(schedule: str, tasks: int) -> list[range]:
    """Which tasks are learnt together at each stage."""
    if schedule == "joint":
        return [range(tasks)]
    if schedule == "retrain":
        return [range(place + 1) for place in range(tasks)]
    return [range(place, place + 1) for place in range(tasks)]
