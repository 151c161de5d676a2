"""Many runs in parallel processes, each with its own directory; one that fails does not stop the others."""

from __future__ import annotations

import multiprocessing
import queue
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from steppe.config import RunConfig
from steppe.errors import SteppeError, UsageError
from steppe.events import Event
from steppe.experiment import run
from steppe.runs import CONFIG, RESULT, read_result, refuse_taken, write_whole, writing
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


def run_all(jobs: Sequence[Job], workers: int, watch: StudyWatch, *, resume: bool = False) -> Outcome:
    """Do all runs, `workers` at a time, each in a process of its own.

    With `resume`, runs that are finished already are kept, and those that broke off are done again from their start.
    """
    outcome = Outcome(results=_finished(jobs) if resume else {})
    waiting = [(number, job) for number, job in enumerate(jobs) if number not in outcome.results][::-1]
    for _, job in waiting:
        if resume:
            shutil.rmtree(job.out, ignore_errors=True)
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

    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number, job = waiting.pop()
                given = (number, job.config.as_toml(), job.out, messages)
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
    """The results that are there already; one of another configuration is refused."""
    found = {}
    for number, job in enumerate(jobs):
        if (job.out / RESULT).exists():
            found[number] = read_result(job.out)
            if RunConfig.from_mapping(found[number]["config"]).as_dict() != job.config.as_dict():
                raise UsageError(f"{job.out} holds a run with other settings: choose another --out.")
        elif job.out.exists() and not (job.out / CONFIG).exists():
            raise UsageError(f"{job.out} is there but holds no run: choose another --out.")
    return found


def write_tables(out: Path, results: Sequence[dict[str, Any]], command: str) -> None:
    """The study's table beside its runs: table.md, table.tex, table.json."""
    texts = {"table.md": markdown(results), "table.tex": latex(results), "table.json": as_json(results, command)}
    for name, text in texts.items():
        with writing(out / name):
            write_whole(out / name, text.encode())


def _context() -> BaseContext:
    """Processes forked from a server that has torch loaded already, where the system can; else spawned."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["steppe.experiment"])
        return context
    return multiprocessing.get_context("spawn")


def _work(number: int, config: str, out: Path, messages: multiprocessing.Queue[tuple[int, Message]]) -> None:
    """One run, in its process, from the text of its configuration: a plugin's classes are known only once it is loaded
    here. Ctrl-C is the parent's business: it ends us by SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    parent = multiprocessing.parent_process()

    def tell(event: Event) -> None:
        if parent is not None and not parent.is_alive():  # killed without a chance to stop us
            raise SystemExit(1)
        messages.put((number, event))

    try:
        messages.put((number, Finished(run(RunConfig.from_toml(config), out, tell))))
    except SteppeError as error:
        messages.put((number, Failed(str(error))))
    except Exception as error:
        messages.put((number, Failed(f"{type(error).__name__}: {error}", traceback.format_exc())))


def _stop(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)
