"""Many runs in parallel processes, each with its own directory; one that fails does not stop the others."""

from __future__ import annotations

import json
import multiprocessing
import queue
import signal
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from steppe.config import RunConfig, plugin_names, same_work
from steppe.errors import RunError, SteppeError, UsageError, in_one_line, shown
from steppe.events import Event
from steppe.experiment import CHECKPOINT_EVERY, left_as_it_is, refuse_other, run
from steppe.files import read_bounded, write_whole, writing
from steppe.runs import CONFIG, PLAN, RESULT, TABLES, refuse_taken
from steppe.stopping import Terminated, first_noted
from steppe.tables import as_json, latex, markdown

_POLL = 0.2  # seconds between looks for a process that ended without a word


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
StudyWatch = Callable[[int, Message], None]


def run_all(
    jobs: Sequence[Job],
    workers: int,
    watch: StudyWatch,
    *,
    resume: bool = False,
    crowd: bool = False,
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
            refuse_taken(job.out)
    for number, result in outcome.results.items():
        watch(number, Finished(result))
    context = _context()
    messages: multiprocessing.Queue[tuple[int, Message]] = context.Queue()
    running: dict[int, BaseProcess] = {}

    def take(number: int, message: Message) -> None:
        if isinstance(message, Finished):
            outcome.results[number] = message.result
        elif isinstance(message, Failed):
            outcome.failures[number] = message
        if isinstance(message, (Finished, Failed)) and number in running:
            running.pop(number).join()
        watch(number, message)

    def may_start() -> bool:
        left = len(waiting) + len(running)
        return len(running) < workers or (crowd and left < 2 * workers)

    try:
        while waiting or running:
            while waiting and may_start():
                number, job = waiting.pop()
                given = (number, job.config.as_toml(), job.out, resume, checkpoint_every, messages)
                running[number] = context.Process(target=_work, args=given, daemon=True)  # type: ignore[attr-defined]
                running[number].start()
            try:
                take(*messages.get(timeout=_POLL))
            except queue.Empty:
                for number, process in list(running.items()):
                    if process.exitcode is not None and messages.empty():
                        take(number, Failed(f"its process ended with exit code {process.exitcode}"))
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()
    return outcome


def _finished(jobs: Sequence[Job]) -> dict[int, dict[str, Any]]:
    """The results that are there already; a run with another configuration is refused."""
    found = {}
    for number, job in enumerate(jobs):
        if (job.out / RESULT).exists():
            found[number] = left_as_it_is(job.out)
            described, wanted = found[number]["config"], job.config.as_dict()
            same_code = plugin_names(described["run"]) == plugin_names(wanted["run"])  # or none is run
            if not same_code or not same_work(RunConfig.from_mapping(described, job.config.plugins).as_dict(), wanted):
                raise UsageError(f"{job.out} holds a run with other settings: choose another --out.")
        elif (job.out / CONFIG).exists():
            refuse_other(job.out, job.config)
    return found


def with_plugins_of(out: Path, config: RunConfig) -> RunConfig:
    """A run that is there already goes on with the plugins that it was begun with, if these are among those given now:
    so a method of a user's own can join a study that knew nothing of its plugin.
    """
    try:
        begun_with = plugin_names(tomllib.loads(read_bounded(out / CONFIG).decode("utf-8-sig"))["run"])
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
        refuse_taken(out, for_study=True)
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
    with writing(out / PLAN):
        write_whole(out / PLAN, (json.dumps({"command": command, "runs": runs}, indent=1) + "\n").encode())


def _planned(out: Path) -> set[Path]:
    """Where the runs of the study that is there already lie, if its plan can be read."""
    try:
        plan = json.loads(read_bounded(out / PLAN))
        return {_within(out, entry["out"]) for entry in plan["runs"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def read_plan(out: Path, plugins: Sequence[str] = ()) -> tuple[list[Job], str]:
    """The runs of a study and the command that it was started by; `plugins` has the files of those that have moved."""
    try:
        plan = json.loads(read_bounded(out / PLAN))
        jobs = [
            Job(RunConfig.from_mapping(entry["config"], plugins), _within(out, entry["out"])) for entry in plan["runs"]
        ]
        if not jobs or len({job.out for job in jobs}) < len(jobs):
            raise ValueError("it has no run, or two in one directory")
        return jobs, str(plan["command"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        told = f"it lacks {error}" if isinstance(error, KeyError) else in_one_line(error)
        raise RunError(f"{out / PLAN} cannot be read as a study: {told}.") from error


def _within(out: Path, name: str) -> Path:
    path = out / name
    if path.resolve() == out.resolve() or not path.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"the run {shown(name)} does not lie within the study")
    return path


def write_tables(out: Path, results: Sequence[dict[str, Any]], command: str) -> None:
    """The study's table beside its runs: for reading, for a paper, for programs."""
    for name, text in zip(TABLES, (markdown(results), latex(results), as_json(results, command)), strict=True):
        with writing(out / name):
            write_whole(out / name, text.encode())


def _context() -> BaseContext:
    """Processes forked from a server that has torch loaded already, where the system can; else spawned."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["steppe.experiment"])
        return context
    return multiprocessing.get_context("spawn")


def _work(
    number: int,
    config: str,
    out: Path,
    resume: bool,
    checkpoint_every: float,
    messages: multiprocessing.Queue[tuple[int, Message]],
) -> None:
    """One run, in its process, from the text of its configuration: a plugin's classes are known only once it is loaded
    here. Ctrl-C is the parent's business: it ends us by SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def orphaned() -> bool:
        return parent is not None and not parent.is_alive()  # killed without a chance to stop us

    def tell(event: Event) -> None:
        if not orphaned():
            messages.put((number, event))

    try:
        with first_noted() as asked:
            parsed = RunConfig.from_toml(config)
            result = run(
                parsed,
                out,
                tell,
                resume=resume,
                checkpoint_every=checkpoint_every,
                stop=lambda: Terminated() if orphaned() else asked(),
            )
        messages.put((number, Finished(result)))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGTERM) from None
    except SteppeError as error:
        messages.put((number, Failed(str(error))))
    except Exception as error:
        messages.put((number, Failed(f"{type(error).__name__}: {error}", traceback.format_exc())))
