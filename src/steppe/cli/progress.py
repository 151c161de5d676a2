"""Progress on the screen: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from steppe.experiments.study import Failed, Finished, Message
from steppe.learning.events import EpochEnded, Progress, RunStarted, TaskEnded
from steppe.runtime.terminal import escape_controls, say

_LINE_EVERY = 30.0  # seconds between lines within a long task


class _State:
    """How far one run is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.monotonic()
        self.tasks = self.batches = 0
        self.first = self.before = self.done = 0  # batches done at the start; of ended epochs; in all
        self.ends: list[int] = []
        self.task = self.epoch = 0
        self.loss = float("nan")
        self.accuracy: float | None = None
        self.outcome = ""

    def take(self, message: Message) -> None:
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
            # A task that validation ended early has taken all the batches it will.
            self.before = self.done = min((end for end in self.ends if end >= self.done), default=self.done)
        elif isinstance(message, Finished):
            bwt = message.result["bwt"]
            self.outcome = f"ACC {message.result['acc']:.2f}" + ("" if bwt is None else f"  BWT {bwt:.2f}")
        elif isinstance(message, Failed):
            self.outcome = f"failed: {message.reason}"

    def describe(self) -> str:
        if self.outcome:
            return self.outcome
        if not self.tasks:
            return "starting"
        accuracy = "" if self.accuracy is None else f"  accuracy so far {self.accuracy:.1f}"
        place = f"task {self.task + 1}/{self.tasks}  epoch {self.epoch + 1}"
        return f"{place}  loss {self.loss:.3f}{accuracy}{self._left()}"

    def _left(self) -> str:
        spent = time.monotonic() - self.started
        if self.done <= self.first or spent < 1:
            return ""
        return f"  {duration(spent * (self.batches - self.done) / (self.done - self.first))} left"


class Display(ABC):
    """Shows what runs tell, by their number; used as a context manager."""

    def __init__(self, names: Sequence[str]) -> None:
        self._states = [_State(name) for name in names]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __call__(self, number: int, message: Message) -> None:
        """Take a run's message."""
        self._states[number].take(message)
        self._shown(number, message)

    @abstractmethod
    def _shown(self, number: int, message: Message) -> None: ...


class LineDisplay(Display):
    """A line for each task, and now and then one within a long task."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._last = dict.fromkeys(range(len(names)), time.monotonic())

    def _shown(self, number: int, message: Message) -> None:
        state = self._states[number]
        due = time.monotonic() - self._last[number] > _LINE_EVERY
        if isinstance(message, (TaskEnded, Finished, Failed)) or (isinstance(message, Progress) and due):
            self._last[number] = time.monotonic()
            say(f"{state.name}: {state.describe()}", file=sys.stderr, flush=True)
        if isinstance(message, (RunStarted, TaskEnded)):
            for remark in message.remarks:
                say(f"{state.name}: {remark}", file=sys.stderr, flush=True)


class BarDisplay(Display):
    """A live bar for each run that is under way or over."""

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

    def _shown(self, number: int, message: Message) -> None:
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
    """Live bars where standard error is a terminal, plain lines where it is not."""
    console = Console(stderr=True)
    return BarDisplay(names, console) if console.is_terminal else LineDisplay(names)


def duration(seconds: float) -> str:
    """A time in the two largest units that matter."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
