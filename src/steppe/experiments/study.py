"""Many runs in parallel processes, each with its own directory; one that fails does not stop the others."""

from __future__ import annotations

import json
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steppe.errors import RunError, SteppeError, UsageError, one_line, short_repr
from steppe.experiments.config import RunConfig, plugin_names, same_experiment
from steppe.experiments.executor import Ended, GoneError, LocalExecutor, Tell
from steppe.experiments.run import CHECKPOINT_EVERY, finalize_existing, require_same_config, run
from steppe.experiments.run_directory import require_free
from steppe.learning.events import EpochEnded, Event, Progress, RunStarted, TaskEnded
from steppe.results.layout import CONFIG, PLAN, RESULT, TABLES
from steppe.results.tables import as_json, latex, markdown
from steppe.runtime.files import explain_write_errors, read_json, read_toml, require_inside, write_atomic
from steppe.runtime.signals import Terminated, deferred_signals


@dataclass(frozen=True)
class Job:
    """One run of a study and where it goes."""

    config: RunConfig
    out: Path


@dataclass(frozen=True)
class Finished:
    """A run is done."""

    result: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """A run could not be done, and why."""

    reason: str
    details: str = ""


@dataclass
class Outcome:
    """What became of all runs, by their place in the list."""

    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, Failed] = field(default_factory=dict)


Message = Event | Finished | Failed
_MESSAGES: dict[str, Callable[..., Message]] = {
    kind.__name__: kind for kind in (RunStarted, Progress, EpochEnded, TaskEnded, Finished, Failed)
}
StudyWatch = Callable[[int, Message], None]


def run_all(
    jobs: Sequence[Job],
    workers: int,
    callback: StudyWatch,
    *,
    resume: bool = False,
    oversubscribe_tail: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> Outcome:
    """Do all runs, `workers` at a time, each in a process of its own.

    With `resume`, runs that are finished are kept, and those that broke off are gone on with. With `crowd`, the last
    runs, fewer than two for each worker, are all started as soon as a worker is free: they share the cores evenly,
    where otherwise some cores would have nothing to do in the end.
    """
    outcome = Outcome(results=_finished(jobs) if resume else {})
    waiting = [(number, job) for number, job in enumerate(jobs) if number not in outcome.results][::-1]
    if not resume:
        for _, job in waiting:
            require_free(job.out)
    for number, result in outcome.results.items():
        callback(number, Finished(result))
    executor = LocalExecutor("steppe.experiments.run")

    def take(number: int, message: Message) -> None:
        if isinstance(message, Finished):
            outcome.results[number] = message.result
        elif isinstance(message, Failed):
            outcome.failures[number] = message
        callback(number, message)

    def may_start() -> bool:
        left = len(waiting) + len(executor)
        return bool(waiting) and (len(executor) < workers or (oversubscribe_tail and left < 2 * workers))

    def over(number: int) -> bool:
        return number in outcome.results or number in outcome.failures

    try:
        while waiting or len(executor):
            while may_start():
                number, job = waiting.pop()
                given = (job.config.as_toml(), job.config.plugins, job.out, resume, checkpoint_every)
                try:
                    executor.submit(number, _work, *given)
                except (OSError, EOFError) as error:
                    take(number, Failed(f"no process could be started for it: {one_line(error)}"))
            for number, told in executor.progress():
                if not isinstance(told, Ended):
                    take(number, _MESSAGES[told.pop("kind")](**told))
                    if over(number):
                        executor.release(number)
                elif not over(number):
                    take(number, Failed(told.reason))
    finally:
        executor.cancel()
    return outcome


def _finished(jobs: Sequence[Job]) -> dict[int, dict[str, Any]]:
    """The results that are there already; a run with another configuration is refused."""
    found = {}
    for number, job in enumerate(jobs):
        if (job.out / RESULT).exists():
            found[number] = finalize_existing(job.out)
            described, wanted = found[number]["config"], job.config.as_dict()
            same_code = plugin_names(described["run"]) == plugin_names(wanted["run"])  # or none is run
            if not same_code or not same_experiment(
                RunConfig.from_mapping(described, job.config.plugins).as_dict(), wanted
            ):
                raise UsageError(f"{job.out} holds a run with other settings: choose another --out.")
        elif (job.out / CONFIG).exists():
            require_same_config(job.out, job.config)
    return found


def with_plugins_of(out: Path, config: RunConfig) -> RunConfig:
    """A run that is there already goes on with the plugins that it was begun with, if these are among those given now:
    so a method of a user's own can join a study that knew nothing of its plugin.
    """
    try:
        begun_with = plugin_names(read_toml(out / CONFIG)["run"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return config  # there is none, or what there is will be refused
    given = [Path(path).name for path in config.plugins]
    if begun_with == given or not set(begun_with) <= set(given):
        return config
    return replace(config, plugins=tuple(path for path in config.plugins if Path(path).name in begun_with))


def write_plan(out: Path, jobs: Sequence[Job], command: str) -> None:
    """Which runs the study consists of, so that it can be resumed from its directory alone; refused where runs are
    there that have other settings or would no longer be part of it.
    """
    if not (out / PLAN).exists():
        require_free(out, for_study=True)
    for job in jobs:
        require_inside(out, job.out)
    _finished(jobs)
    begun = {path for path in _planned(out) if (path / CONFIG).exists() or (path / RESULT).exists()}
    if missing := begun - {job.out for job in jobs}:
        names = sorted(str(path.relative_to(out)) for path in missing)
        told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UsageError(
            f"{out} holds a study to which {told} belong as well: name all its methods and seeds, or choose another "
            "--out."
        )
    runs = [{"out": str(job.out.relative_to(out)), "config": job.config.as_dict()} for job in jobs]
    with explain_write_errors(out / PLAN):
        write_atomic(
            require_inside(out, out / PLAN), (json.dumps({"command": command, "runs": runs}, indent=1) + "\n").encode()
        )


def _planned(out: Path) -> set[Path]:
    """Where the runs of the study that is there already lie, if its plan can be read."""
    try:
        plan = read_json(out / PLAN)
        return {_within(out, entry["out"]) for entry in plan["runs"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def read_plan(out: Path, plugins: Sequence[str] = (), *, trust_plugins: bool = False) -> tuple[list[Job], str]:
    """The runs of a study and the command that it was started by.

    Args:
        out: The study's directory, which may be a stranger's.
        plugins: The plugins that may be run, by `RunConfig.from_mapping`.
        trust_plugins: Run whatever plugins the plan names.
    """
    try:
        plan = read_json(out / PLAN)
        jobs = [
            Job(
                RunConfig.from_mapping(entry["config"], plugins, trust_plugins=trust_plugins),
                _within(out, entry["out"]),
            )
            for entry in plan["runs"]
        ]
        if not jobs or len({job.out for job in jobs}) < len(jobs):
            raise ValueError("it has no run, or two in one directory")
        return jobs, str(plan["command"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        told = f"it lacks {error}" if isinstance(error, KeyError) else one_line(error)
        raise RunError(f"{out / PLAN} cannot be read as a study: {told}.") from error


def _within(out: Path, name: str) -> Path:
    path = out / name
    if path.resolve() == out.resolve() or not path.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"the run {short_repr(name)} does not lie within the study")
    return path


def write_tables(out: Path, results: Sequence[dict[str, Any]], command: str) -> None:
    """The study's table beside its runs: for reading, for a paper, for programs."""
    for name, text in zip(TABLES, (markdown(results), latex(results), as_json(results, command)), strict=True):
        with explain_write_errors(out / name):
            write_atomic(require_inside(out, out / name), text.encode())


def _work(tell: Tell, config: str, plugins: Sequence[str], out: Path, resume: bool, checkpoint_every: float) -> None:
    """One run, in its process, from the text of its configuration: a plugin's classes are known only once it is loaded
    here. The plugins are those that the parent has run.
    """
    parent = multiprocessing.parent_process()
    gone = False

    def orphaned() -> bool:
        return gone or (parent is not None and not parent.is_alive())  # killed without a chance to stop us

    def send(message: Message) -> None:
        nonlocal gone
        try:
            if not gone:
                tell({"kind": type(message).__name__, **vars(message)})
        except GoneError:
            gone = True  # the run keeps a state, and stops, when it next asks

    try:
        with deferred_signals() as asked:
            parsed = RunConfig.from_toml(config, plugins)
            result = run(
                parsed,
                out,
                send,
                resume=resume,
                checkpoint_every=checkpoint_every,
                stop=lambda: Terminated() if orphaned() else asked(),
            )
        send(Finished(result))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGTERM) from None
    except SteppeError as error:
        send(Failed(str(error)))
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
