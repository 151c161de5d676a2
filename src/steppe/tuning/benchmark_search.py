"""A search on a benchmark: its trials are runs, each in a process and a directory of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from steppe.errors import UsageError, one_line
from steppe.experiments.executor import LocalExecutor, WorkerExited
from steppe.experiments.run import CHECKPOINT_EVERY
from steppe.experiments.run_directory import RunDirectory
from steppe.experiments.study import Failed, Finished, Message, Pruned, decode, run_job
from steppe.learning.events import TaskEnded
from steppe.results.file_names import LOG
from steppe.runtime.files import parse_json, read_bounded, require_inside
from steppe.tuning.plan import SearchPlan
from steppe.tuning.trials import Trial, Trials

TRIALS_FOLDER = "trials"
BEHIND = "worse than the median of the complete trials"


def open_trials(plan: SearchPlan, out: Path) -> Trials:
    """Open the trials of a search in its directory, which this process must have locked."""
    settings = plan.config.method_settings
    kinds = {name: kind for name, (kind, _) in type(settings).schema().items()}
    return Trials(out, plan.space, kinds, settings.as_dict(), seed=plan.seed)


def missing_trials(plan: SearchPlan, trials: Trials) -> int:
    """How many trials are still to be started; failed ones are replaced."""
    return max(plan.trials - sum(trial.state != "failed" for trial in trials.all()), 0)


def run_trials(
    plan: SearchPlan,
    trials: Trials,
    out: Path,
    workers: int,
    callback: Callable[[int, Message], None],
    *,
    num_tasks: int,
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> None:
    """Resume the trials that were interrupted, and make new ones.

    Args:
        plan: The search.
        trials: Its trials.
        out: Its directory.
        workers: Number of processes.
        callback: Called with a trial's number and each of its messages.
        num_tasks: The number of tasks in a trial, after the last of which it is not pruned.
        checkpoint_every: Seconds between checkpoints within a task.
    """
    executor = LocalExecutor("steppe.experiments.run")
    interrupted = [trial.number for trial in trials.all() if trial.state == "running"]
    left, open_ones = missing_trials(plan, trials), set[int]()

    def end(number: int, message: Message) -> None:
        if isinstance(message, Finished):
            trials.finish(number, message.result.acc)
        elif isinstance(message, Pruned):
            trials.prune(number, message.reason)
        elif isinstance(message, Failed):
            trials.fail(number, message.reason)
        open_ones.discard(number)
        callback(number, message)
        RunDirectory(trial_directory(out, number)).drop_checkpoints()

    def handle(number: int, message: Message) -> None:
        if isinstance(message, Failed) and message.diverged:
            end(number, Pruned("diverged"))
        elif isinstance(message, (Finished, Failed)):
            end(number, message)
        else:
            callback(number, message)
            if isinstance(message, TaskEnded) and is_behind(number, message.task + 1, fmean(message.accuracy)):
                executor.stop(number)
                end(number, Pruned(f"{BEHIND} after {message.task + 1} tasks"))

    def is_behind(number: int, tasks: int, score: float) -> bool:
        return trials.report(number, tasks, score) and plan.prune and tasks < num_tasks

    def start(trial: Trial) -> None:
        open_ones.add(trial.number)
        place = require_inside(out, trial_directory(out, trial.number))
        for tasks, score in _logged_scores(place):  # a killed search may have missed the last ones
            if is_behind(trial.number, tasks, score):
                end(trial.number, Pruned(f"{BEHIND} after {tasks} tasks"))
                return
        try:
            config = plan.trial_config(trial.values)
            executor.submit(trial.number, run_job, config.as_toml(), config.plugins, place, True, checkpoint_every)
        except UsageError as error:  # values that exclude each other
            end(trial.number, Failed(str(error)))
        except (OSError, EOFError) as error:
            end(trial.number, Failed(f"cannot start a process: {one_line(error)}"))

    try:
        while interrupted or left or len(executor):
            while len(executor) < workers and (interrupted or left):
                if interrupted:
                    start(trials.resume(interrupted.pop(0)))
                else:
                    left -= 1
                    start(trials.ask())
            for number, payload in executor.poll():
                if number not in open_ones:
                    continue  # it was ended while its last messages were under way
                if not isinstance(payload, WorkerExited):
                    handle(number, decode(payload))
                    if number not in open_ones:
                        executor.release(number)
                else:
                    handle(number, Failed(payload.reason))
    finally:
        executor.cancel()


def trial_directory(out: Path, number: int) -> Path:
    """The run directory of a trial."""
    return out / TRIALS_FOLDER / f"{number:04d}"


def _logged_scores(place: Path) -> Iterator[tuple[int, float]]:
    """The number of tasks seen and the mean score on them, from the log of an interrupted run."""
    file = place / LOG
    if not file.exists():
        return
    for line in read_bounded(file).splitlines():
        try:
            record: Any = parse_json(line)
            if record["event"] == TaskEnded.__name__:
                yield int(record["task"]) + 1, float(fmean(record["accuracy"]))
        except (ValueError, KeyError, TypeError, json.JSONDecodeError):
            return  # the last line may be incomplete
