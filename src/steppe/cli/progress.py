"""Progress on stderr: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from steppe.experiments.study import Failed, Finished, Message, Pruned
from steppe.learning.events import EpochEnded, Progress, RunStarted, TaskEnded
from steppe.runtime.terminal import escape_controls, say

_LINE_EVERY = 30.0  # seconds between lines within a long task

Update = Callable[..., None]
"""Takes what is done, the total and, optionally, what is being worked on."""


@contextmanager
def show_progress(name: str) -> Iterator[Update]:
    """Show one activity: a bar on a terminal; elsewhere a line for every tenth, and for every half minute.

    Args:
        name: The name of the activity.

    Yields:
        A function `update(done, total, text="")`.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LineProgress(name)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(escape_controls(name), total=None)

        def update(done: int, total: int, text: str = "") -> None:
            bars.update(bar, description=escape_controls(_join(name, text)), completed=done, total=total)

        yield update


class _LineProgress:
    """Prints a line for every tenth, and for every half minute."""

    def __init__(self, name: str) -> None:
        self._name, self._tenth, self._last = name, -1, time.monotonic()

    def __call__(self, done: int, total: int, text: str = "") -> None:
        tenth = 10 * done // total
        if tenth != self._tenth or time.monotonic() - self._last > _LINE_EVERY:
            self._tenth, self._last = tenth, time.monotonic()
            _print_line(_join(self._name, text), f"{100 * done // total} % of {total:,}")


def _join(name: str, text: str) -> str:
    return f"{name}: {text}" if text else name


def _print_line(name: str, text: str) -> None:
    say(f"{name}: {text}", file=sys.stderr, flush=True)


class _RunProgress:
    """The progress of one run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.monotonic()
        self.tasks = self.batches = 0
        self.first = self.before = self.done = 0  # batches done: at the start, in finished epochs, in total
        self.ends: list[int] = []
        self.task = self.epoch = 0
        self.loss = float("nan")
        self.accuracy: float | None = None
        self.outcome = ""

    def update(self, message: Message) -> None:
        if isinstance(message, RunStarted):
            self.started, self.tasks, self.batches = time.monotonic(), message.tasks, message.batches
            self.first = self.before = self.done = message.batches_before
            self.ends = message.ends
        elif isinstance(message, Progress):
            self.task, self.epoch, self.loss = message.task, message.epoch, message.loss
            self.done = self.before + message.batch
        elif isinstance(message, EpochEnded):
            self.task, self.epoch, self.loss = message.task, message.epoch, message.loss
            self.before = self.done = self.before + message.batches
        elif isinstance(message, TaskEnded):
            self.accuracy = sum(message.accuracy) / len(message.accuracy)
            # A task that validation ended early needs no more batches.
            self.before = self.done = min((end for end in self.ends if end >= self.done), default=self.done)
        elif isinstance(message, Finished):
            bwt = message.result.bwt
            self.outcome = f"ACC {message.result.acc:.2f}" + ("" if bwt is None else f"  BWT {bwt:.2f}")
        elif isinstance(message, Failed):
            self.outcome = f"failed: {message.reason}"
        elif isinstance(message, Pruned):
            self.outcome = message.reason

    def describe(self) -> str:
        if self.outcome:
            return self.outcome
        if not self.tasks:
            return "starting"
        accuracy = "" if self.accuracy is None else f"  accuracy {self.accuracy:.1f}"
        position = f"task {self.task + 1}/{self.tasks}  epoch {self.epoch + 1}"
        return f"{position}  loss {self.loss:.3f}{accuracy}{self._time_left()}"

    def _time_left(self) -> str:
        elapsed = time.monotonic() - self.started
        if self.done <= self.first or elapsed < 1:
            return ""
        return f"  {format_duration(elapsed * (self.batches - self.done) / (self.done - self.first))} left"


class Display(ABC):
    """Shows the progress of runs, by their numbers; a context manager."""

    def __init__(self, names: Sequence[str]) -> None:
        self._states = [_RunProgress(name) for name in names]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __call__(self, number: int, message: Message) -> None:
        """Handle a message of a run."""
        self._states[number].update(message)
        self._show(number, message)

    @abstractmethod
    def _show(self, number: int, message: Message) -> None: ...


class LineDisplay(Display):
    """Prints a line after each task, and every half minute within a long one."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._last = dict.fromkeys(range(len(names)), time.monotonic())

    def _show(self, number: int, message: Message) -> None:
        state = self._states[number]
        due = time.monotonic() - self._last[number] > _LINE_EVERY
        if isinstance(message, (TaskEnded, Finished, Failed, Pruned)) or (isinstance(message, Progress) and due):
            self._last[number] = time.monotonic()
            _print_line(state.name, state.describe())
        if isinstance(message, (RunStarted, TaskEnded)):
            for remark in message.remarks:
                _print_line(state.name, remark)


class BarDisplay(Display):
    """A live bar for each run that has started."""

    def __init__(self, names: Sequence[str], console: Console) -> None:
        super().__init__(names)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.fields[name]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=console,
        )
        self._ids: dict[int, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def _show(self, number: int, message: Message) -> None:
        state = self._states[number]
        if number not in self._ids:
            self._ids[number] = self._bars.add_task("", name=escape_controls(state.name), total=None)
        if isinstance(message, (RunStarted, TaskEnded)):
            for remark in message.remarks:
                self._bars.console.print(escape_controls(f"{state.name}: {remark}"), markup=False, highlight=False)
        total = state.batches or None
        done = total if total and isinstance(message, Finished) else state.done
        self._bars.update(self._ids[number], total=total, completed=done, description=escape_controls(state.describe()))


def make_display(names: Sequence[str]) -> Display:
    """Return live bars if stderr is a terminal, plain lines otherwise."""
    console = Console(stderr=True)
    return BarDisplay(names, console) if console.is_terminal else LineDisplay(names)


def format_duration(seconds: float) -> str:
    """Format a time in its two largest units, such as 3 min 05 s."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
