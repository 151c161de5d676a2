"""Studies: many runs in parallel processes, each with its own directory. A failed run does not stop the others."""

from __future__ import annotations

import json
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steppe.errors import DivergedError, RunError, SteppeError, UsageError, one_line, short_repr
from steppe.experiments.config import RunConfig, plugin_names
from steppe.experiments.executor import LocalExecutor, ParentGoneError, Send, WorkerExited
from steppe.experiments.run import CHECKPOINT_EVERY, different_settings, finalize_existing, require_same_config, run
from steppe.experiments.run_directory import require_free
from steppe.learning.events import EpochEnded, Event, Progress, RunStarted, TaskEnded
from steppe.results.file_names import CONFIG, PLAN, RESULT, TABLES
from steppe.results.schema import RunResult
from steppe.results.tables import as_json, latex, markdown
from steppe.runtime.files import explain_write_errors, read_json, read_toml, require_inside, write_atomic
from steppe.runtime.signals import Terminated, deferred_signals


@dataclass(frozen=True)
class Job:
    """One run of a study and its directory."""

    config: RunConfig
    out: Path


@dataclass(frozen=True)
class Finished:
    """A run has finished."""

    result: RunResult


@dataclass(frozen=True)
class Failed:
    """A run has failed."""

    reason: str
    details: str = ""
    diverged: bool = False
    """Whether a loss or a gradient was no longer finite."""


@dataclass(frozen=True)
class Pruned:
    """A trial of a search was ended early."""

    reason: str


@dataclass
class Outcome:
    """Results and failures of the runs, by index."""

    results: dict[int, RunResult] = field(default_factory=dict)
    failures: dict[int, Failed] = field(default_factory=dict)


Message = Event | Finished | Failed | Pruned
_MESSAGES: dict[str, Callable[..., Message]] = {
    kind.__name__: kind for kind in (RunStarted, Progress, EpochEnded, TaskEnded, Failed)
}
StudyCallback = Callable[[int, Message], None]


def _encode(message: Message) -> dict[str, Any]:
    """A message as plain values, which JSON can hold."""
    values = {"result": message.result.as_dict()} if isinstance(message, Finished) else vars(message)
    return {"kind": type(message).__name__, **values}


def decode(data: dict[str, Any]) -> Message:
    """The message in plain values."""
    kind, values = data["kind"], {key: value for key, value in data.items() if key != "kind"}
    if kind == Finished.__name__:
        return Finished(RunResult.from_dict(values["result"]))
    return _MESSAGES[kind](**values)


def run_all(
    jobs: Sequence[Job],
    workers: int,
    callback: StudyCallback,
    *,
    resume: bool = False,
    oversubscribe_tail: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> Outcome:
    """Execute the runs in parallel, each in its own process.

    Args:
        jobs: The runs.
        workers: Number of processes.
        callback: Called with a run's index and each of its messages.
        resume: Keep finished runs and resume interrupted ones.
        oversubscribe_tail: Start all remaining runs once there are fewer than two per worker. They share the cores
            evenly; otherwise some cores would be idle at the end.
        checkpoint_every: Seconds between checkpoints within a task.

    Returns:
        The results and failures.

    Raises:
        UsageError: A directory is in use, or contains a run with different settings.
    """
    outcome = Outcome(results=_finished_results(jobs) if resume else {})
    waiting = [(number, job) for number, job in enumerate(jobs) if number not in outcome.results][::-1]
    if not resume:
        for _, job in waiting:
            require_free(job.out)
    for number, result in outcome.results.items():
        callback(number, Finished(result))
    executor = LocalExecutor("steppe.experiments.run")

    def handle(number: int, message: Message) -> None:
        if isinstance(message, Finished):
            outcome.results[number] = message.result
        elif isinstance(message, Failed):
            outcome.failures[number] = message
        callback(number, message)

    def may_start() -> bool:
        unfinished = len(waiting) + len(executor)
        return bool(waiting) and (len(executor) < workers or (oversubscribe_tail and unfinished < 2 * workers))

    def is_done(number: int) -> bool:
        return number in outcome.results or number in outcome.failures

    try:
        while waiting or len(executor):
            while may_start():
                number, job = waiting.pop()
                arguments = (job.config.as_toml(), job.config.plugins, job.out, resume, checkpoint_every)
                try:
                    executor.submit(number, run_job, *arguments)
                except (OSError, EOFError) as error:
                    handle(number, Failed(f"cannot start a process: {one_line(error)}"))
            for number, payload in executor.poll():
                if not isinstance(payload, WorkerExited):
                    handle(number, decode(payload))
                    if is_done(number):
                        executor.release(number)
                elif not is_done(number):
                    handle(number, Failed(payload.reason))
    finally:
        executor.cancel()
    return outcome


def _finished_results(jobs: Sequence[Job]) -> dict[int, RunResult]:
    """Return the existing results; raise a UsageError if a run has different settings."""
    found = {}
    for number, job in enumerate(jobs):
        if (job.out / RESULT).exists():
            found[number] = finalize_existing(job.out)
            if not job.config.matches(found[number].config):
                raise different_settings(job.out)
        elif (job.out / CONFIG).exists():
            require_same_config(job.out, job.config)
    return found


def keep_original_plugins(out: Path, config: RunConfig) -> RunConfig:
    """Return the configuration with the plugins that the run in this directory was started with.

    A custom method can thus be added to a study that was started without its plugin.

    Args:
        out: The run's directory, which need not exist.
        config: The configuration with all plugins given now.

    Returns:
        The configuration with the original plugins, if all of them are given; otherwise unchanged.
    """
    try:
        original = plugin_names(read_toml(out / CONFIG)["run"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return config  # there is no run, or an invalid one that is rejected later
    names = [Path(path).name for path in config.plugins]
    if original == names or not set(original) <= set(names):
        return config
    return replace(config, plugins=tuple(path for path in config.plugins if Path(path).name in original))


def write_plan(out: Path, jobs: Sequence[Job], command: str) -> None:
    """Write study.json, which lists the study's runs, so that it can be resumed from its directory alone.

    Args:
        out: The study's directory.
        jobs: The runs.
        command: The command that started the study.

    Raises:
        UsageError: The directory contains a run with different settings, or one missing from `jobs`.
    """
    if not (out / PLAN).exists():
        require_free(out, for_study=True)
    for job in jobs:
        require_inside(out, job.out)
    _finished_results(jobs)
    started = {path for path in _planned_directories(out) if (path / CONFIG).exists() or (path / RESULT).exists()}
    if missing := started - {job.out for job in jobs}:
        names = sorted(str(path.relative_to(out)) for path in missing)
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UsageError(
            f"{out} contains a study that also includes {listed}; name all its methods and seeds, or choose another "
            "--out."
        )
    runs = [{"out": str(job.out.relative_to(out)), "config": job.config.as_dict()} for job in jobs]
    with explain_write_errors(out / PLAN):
        write_atomic(
            require_inside(out, out / PLAN), (json.dumps({"command": command, "runs": runs}, indent=1) + "\n").encode()
        )


def _planned_directories(out: Path) -> set[Path]:
    """Return the run directories of the existing study, if its plan is readable."""
    try:
        plan = read_json(out / PLAN)
        return {_resolve_in_study(out, entry["out"]) for entry in plan["runs"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def read_plan(out: Path, plugins: Sequence[str] = (), *, trust_plugins: bool = False) -> tuple[list[Job], str]:
    """Read study.json.

    Args:
        out: The study's directory, which need not be trusted.
        plugins: Plugins that may be executed, as in `RunConfig.from_mapping`.
        trust_plugins: Also execute the plugins named in the file.

    Returns:
        The runs, and the command that started the study.

    Raises:
        RunError: The file is missing or invalid.
        UsageError: A configuration is invalid, or needs a plugin that may not be executed.
    """  # noqa: DOC501
    try:
        plan = read_json(out / PLAN)
        jobs = [
            Job(
                RunConfig.from_mapping(entry["config"], plugins, trust_plugins=trust_plugins),
                _resolve_in_study(out, entry["out"]),
            )
            for entry in plan["runs"]
        ]
        if not jobs or len({job.out for job in jobs}) < len(jobs):
            raise ValueError("it has no runs, or two in one directory")
        return jobs, str(plan["command"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        raise RunError(f"cannot read {out / PLAN} as a study: {reason}.") from error


def _resolve_in_study(out: Path, name: str) -> Path:
    path = out / name
    if path.resolve() == out.resolve() or not path.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"run directory {short_repr(name)} is outside the study")
    return path


def write_tables(out: Path, results: Sequence[RunResult], command: str) -> None:
    """Write the study's table as Markdown, LaTeX and JSON."""
    for name, text in zip(TABLES, (markdown(results), latex(results), as_json(results, command)), strict=True):
        with explain_write_errors(out / name):
            write_atomic(require_inside(out, out / name), text.encode())


def run_job(send: Send, config: str, plugins: Sequence[str], out: Path, resume: bool, checkpoint_every: float) -> None:
    """Execute one run in a worker process.

    Args:
        send: Sends a message to the parent.
        config: The configuration as TOML: classes from plugins cannot be unpickled before the plugins are loaded here.
        plugins: Plugins that may be executed.
        out: The run directory.
        resume: Whether to continue a run that was interrupted.
        checkpoint_every: Seconds between checkpoints.

    Raises:
        SystemExit: The run was interrupted.
    """
    parent = multiprocessing.parent_process()
    gone = False

    def orphaned() -> bool:
        return gone or (parent is not None and not parent.is_alive())  # the parent was killed and could not stop us

    def emit(message: Message) -> None:
        nonlocal gone
        try:
            if not gone:
                send(_encode(message))
        except ParentGoneError:
            gone = True  # the run saves a checkpoint and stops when it next calls `stop`

    try:
        with deferred_signals() as signalled:
            parsed = RunConfig.from_toml(config, plugins)
            result = run(
                parsed,
                out,
                emit,
                resume=resume,
                checkpoint_every=checkpoint_every,
                stop=lambda: Terminated() if orphaned() else signalled(),
            )
        emit(Finished(result))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGTERM) from None
    except SteppeError as error:
        emit(Failed(str(error), diverged=isinstance(error, DivergedError)))
    except Exception as error:
        emit(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
