"""`steppe.search`: find good settings for a model and tasks of your own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import PicklingError
from typing import Any

from torch import nn

from steppe.data.task import Task
from steppe.errors import DivergedError, RunError, SteppeError, UsageError, one_line
from steppe.experiments.executor import LocalExecutor, Send, WorkerExited
from steppe.experiments.run_directory import lock_directory
from steppe.learning.learner import Learner
from steppe.learning.load_learner import load
from steppe.methods.base import MethodConfig, settings_of
from steppe.registry import find_method
from steppe.results.file_names import SEARCH
from steppe.runtime.files import expand_path, explain_write_errors, read_json, require_inside, write_atomic
from steppe.runtime.rng import Streams, preserve_global_rng
from steppe.settings import SearchRange, TrainingConfig, Value
from steppe.tuning.space import as_plain, build_space
from steppe.tuning.trials import Trial, Trials, require_optuna

_FOLDER = "trials"


@dataclass(frozen=True)
class SearchResult:
    """What `steppe.search` found.

    Attributes:
        method: The settings of the best trial.
        score: Its score: the mean over the tasks after the last one, on validation data.
        trials: All trials.
        table: The trials as a Markdown table, the best one first.
        out: The directory of the search, with the same table, a picture, and what is needed to resume.
    """

    method: MethodConfig
    score: float
    trials: tuple[Trial, ...]
    table: str = field(repr=False)
    out: Path


@dataclass(frozen=True)
class _Work:
    """What every trial needs."""

    make_model: Callable[[], nn.Module]
    tasks: Sequence[Task]
    method: MethodConfig
    seed: int
    learner: Mapping[str, Any]
    training: TrainingConfig

    def scores(self, values: Mapping[str, Value], file: Path) -> Iterator[tuple[int, float]]:
        """Make a trial: after each task, yield the number of tasks seen and the mean score on them.

        Args:
            values: The settings to try.
            file: The learner after the last task, from which an interrupted trial continues.

        Yields:
            Tasks and score.
        """
        with preserve_global_rng(seed=Streams(self.seed).derive_seed("model")):
            model = self.make_model()
        learner = self._saved(file, model) or Learner(
            model, self.method.replace(**values), seed=self.seed, **self.learner
        )
        step = 1 if self.method.schedule == "sequential" else len(self.tasks)
        while learner.num_tasks < len(self.tasks):
            done = learner.num_tasks + step
            learner.learn(self.tasks[done - step : done], **self.training.as_dict())  # type: ignore[arg-type]
            scores = learner.evaluate(self.tasks[:done])
            yield done, sum(scores) / done
            if learner.is_saveable and done < len(self.tasks):
                learner.save(file)

    def _saved(self, file: Path, model: nn.Module) -> Learner | None:
        if not file.exists():
            return None
        kept = {name: value for name, value in self.learner.items() if name not in ("exclude", "head", "grow")}
        return load(file, model, **kept)


def search(
    make_model: Callable[[], nn.Module],
    tasks: Sequence[Task],
    method: MethodConfig | str,
    *,
    out: Path | str,
    trials: int = 20,
    jobs: int = 1,
    choose_on: int = 0,
    space: Mapping[str, SearchRange] | None = None,
    prune: bool = True,
    minimize: bool = False,
    seed: int = 0,
    search_seed: int = 0,
    learner: Mapping[str, Any] | None = None,
    **training: Any,
) -> SearchResult:
    """Find good settings of a method for your own model and tasks, with Optuna.

    Each trial learns the tasks with other settings and is scored on their validation data (`Task.val`); test data are
    not used. The same call continues a search that was interrupted, and makes more trials if `trials` is higher.

    Args:
        make_model: Returns a new model. Every trial starts from the same initial weights.
        tasks: The tasks in order, each with `val`.
        method: The method's settings, which are the first trial, or its name.
        out: The directory of the search.
        trials: The number of trials.
        jobs: The number of processes. With more than one, everything passed must be picklable.
        choose_on: Try settings on this many first tasks, to use them on the other ones; 0: on all tasks.
        space: Other values to try, by setting, made by `steppe.log_range`, `linear_range` or `one_of`.
        prune: Whether to end trials early that are worse than the median after a task.
        minimize: Whether lower scores are better, for a learner with a `metric` such as an error.
        seed: The seed of every trial's learner.
        search_seed: The seed of the suggestions.
        learner: Further arguments of every trial's `Learner`, such as `{"head": "out"}`.
        training: Arguments of `Learner.learn`, such as `epochs=5`.

    Returns:
        The best settings, and all trials.

    Raises:
        UsageError: An argument is invalid, or the directory has another search.
        RunError: Optuna is not installed, no trial was completed, or a file cannot be written.

    Example:
        ```python
        found = steppe.search(make_model, tasks, "er", out="search", trials=30, epochs=5)
        learner = steppe.Learner(make_model(), found.method)
        ```
    """
    require_optuna()
    name = method if isinstance(method, str) else ""
    settings = settings_of(method)
    chosen = _tasks_to_try(tasks, choose_on)
    if trials < 1 or jobs < 1:
        raise UsageError(f"trials and jobs must be at least 1, got {trials} and {jobs}.")
    options = dict(learner or {})
    if clash := sorted({"model", "method", "seed"} & options.keys()):
        raise UsageError(f"learner: {clash[0]} is an argument of search itself; pass it there.")
    default = find_method(name).search_space(settings) if name else settings.search_space()
    ranges = build_space(settings, default, space or {})
    work = _Work(make_model, chosen, settings, seed, options, TrainingConfig.from_mapping(training))
    place = expand_path(str(out))
    plan = {
        "choose_on": choose_on,
        "prune": prune,
        "minimize": minimize,
        "seed": seed,
        "search_seed": search_seed,
        "space": as_plain(ranges),
        "method": {"kind": type(settings).__name__, "values": settings.as_dict()},
        "training": work.training.as_dict(),
        "tasks": [[task.name, len(task.train), len(task.val or ())] for task in chosen],
    }
    with lock_directory(place, "wait for it, or choose another out"):
        _require_same_plan(place, plan)
        kinds = {key: kind for key, (kind, _) in type(settings).schema().items()}
        own = Trials(place, ranges, kinds, settings.as_dict(), seed=search_seed, minimize=minimize)
        _Search(work, own, place, prune=prune).run(trials, jobs)
        return _outcome(place, own, ranges, plan, settings)


def _tasks_to_try(tasks: Sequence[Task], choose_on: int) -> list[Task]:
    """The tasks of a trial, with validation data in place of test data."""
    if not tasks or not all(isinstance(task, Task) for task in tasks):
        raise UsageError("expected a list of steppe.Task with at least one task.")
    if not 0 <= choose_on < len(tasks):
        raise UsageError(f"choose_on = {choose_on} must be less than the number of tasks, {len(tasks)}.")
    for task in tasks[: choose_on or None]:
        if task.val is None:
            raise UsageError(f"{task.name}: a search needs validation data; pass val=(x, y) to the task.")
    return [
        Task(task.train, task.val, val=task.val, head=task.head, augment=task.augment, name=task.name)
        for task in tasks[: choose_on or None]
    ]


def _require_same_plan(out: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a new search; reject a directory with another one."""
    file = out / SEARCH
    if file.exists():
        try:
            same = read_json(file) == json.loads(json.dumps(plan))
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"cannot read {file} as a search: {one_line(error)}.") from error
        if not same:
            raise UsageError(f"{out} contains a search with other settings or tasks; choose another out.")
        return
    with explain_write_errors(file):
        write_atomic(require_inside(out, file), (json.dumps(plan, indent=1) + "\n").encode())


class _Search:
    """The loop over trials, in this process or in several."""

    def __init__(self, work: _Work, trials: Trials, out: Path, *, prune: bool) -> None:
        self._work, self._trials, self._out, self._prune = work, trials, out, prune

    def run(self, total: int, jobs: int) -> None:
        interrupted = [trial.number for trial in self._trials.all() if trial.state == "running"]
        missing = max(total - sum(trial.state != "failed" for trial in self._trials.all()), 0)
        waiting = [*interrupted, *[None] * missing]
        if jobs > 1:
            self._run_in_processes(waiting, jobs)
            return
        for number in waiting:
            self._run_here(self._next(number))

    def _next(self, number: int | None) -> Trial:
        return self._trials.ask() if number is None else self._trials.resume(number)

    def _run_here(self, trial: Trial) -> None:
        if self._is_over(trial):
            return
        try:
            for tasks, score in self._work.scores(trial.values, self._file(trial.number)):
                if self._is_ended_by(trial.number, tasks, score):
                    return
        except DivergedError:
            self._end(trial.number, "diverged")

    def _run_in_processes(self, waiting: list[int | None], jobs: int) -> None:
        executor, running = LocalExecutor("steppe.tuning.learner_search"), set[int]()
        try:
            while waiting or len(executor):
                while waiting and len(executor) < jobs:
                    trial = self._next(waiting.pop(0))
                    if not self._is_over(trial):
                        self._submit(executor, trial)
                        running.add(trial.number)
                for number, payload in executor.poll():
                    if number in running and self._is_ended(number, payload):
                        running.discard(number)
                        executor.stop(number)
        finally:
            executor.cancel()

    def _submit(self, executor: LocalExecutor, trial: Trial) -> None:
        try:
            executor.submit(trial.number, _run_trial, self._work, trial.values, self._file(trial.number))
        except (PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"jobs above 1 need picklable arguments: {one_line(error)}; define make_model and other functions at "
                "the top of a module, or pass jobs=1."
            ) from error

    def _is_ended(self, number: int, payload: dict[str, Any] | WorkerExited) -> bool:
        """Handle a message of a worker; return whether the trial is over."""
        if isinstance(payload, WorkerExited):
            self._trials.fail(number, payload.reason)
            return True
        if "failed" in payload:
            if payload["diverged"]:
                self._end(number, "diverged")
            else:
                self._trials.fail(number, payload["failed"])
            return True
        return self._is_ended_by(number, payload["tasks"], payload["score"])

    def _is_over(self, trial: Trial) -> bool:
        """Whether the scores of an interrupted trial already end it."""
        return any(self._is_ended_by(trial.number, tasks, score) for tasks, score in trial.scores.items())

    def _is_ended_by(self, number: int, tasks: int, score: float) -> bool:
        behind = self._trials.report(number, tasks, score)
        if tasks == len(self._work.tasks):
            self._trials.finish(number, score)
        elif behind and self._prune:
            self._trials.prune(number, f"worse than the median of the complete trials after {tasks} tasks")
        else:
            return False
        self._file(number).unlink(missing_ok=True)
        return True

    def _end(self, number: int, note: str) -> None:
        self._trials.prune(number, note)
        self._file(number).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        folder = require_inside(self._out, self._out / _FOLDER)
        with explain_write_errors(folder):
            folder.mkdir(exist_ok=True)
        return folder / f"{number:04d}.learner"


def _run_trial(send: Send, work: _Work, values: Mapping[str, Value], file: Path) -> None:
    """Make a trial in a worker process."""
    try:
        for tasks, score in work.scores(values, file):
            send({"tasks": tasks, "score": score})
    except SteppeError as error:
        send({"failed": str(error), "diverged": isinstance(error, DivergedError)})
    except Exception as error:
        send({"failed": f"{type(error).__name__}: {error}", "diverged": False})


def _outcome(
    out: Path,
    trials: Trials,
    ranges: Mapping[str, SearchRange],
    plan: Mapping[str, Any],
    settings: MethodConfig,
) -> SearchResult:
    from steppe.tuning.outcome import write_outcome

    table, _ = write_outcome(out, trials, dict(ranges), plan, None, "validation score")
    best, every = trials.best(), trials.all()
    if best is None:
        reasons = "; ".join(sorted({trial.note for trial in every if trial.note})) or "no reason is known"
        raise RunError(f"no trial was completed: {reasons}.")
    return SearchResult(settings.replace(**best.values), float(best.score or 0.0), tuple(every), table, out)
