"""Being asked to stop, by Ctrl-C or SIGTERM (which `kill` and schedulers send): what can be kept is kept first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

Stop = Callable[[], BaseException | None]
"""What to stop with, if one was asked to; None as long as nobody has."""

_Handler = Callable[[int, FrameType | None], None]


class Terminated(KeyboardInterrupt):
    """SIGTERM: everything stops as it does by Ctrl-C."""


def never() -> None:
    """Nobody asks to stop."""


@contextmanager
def raise_on_termination() -> Iterator[None]:
    """Meanwhile SIGTERM raises `Terminated`, so that whatever is open gets closed."""
    with _handled({signal.SIGTERM: _raise}):
        yield


@contextmanager
def deferred_signals() -> Iterator[Stop]:
    """Meanwhile the first signal to stop is only noted: whoever works looks for it where the work can be kept. Another
    one ends it at once.
    """
    noted: list[BaseException] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            _raise(number, frame)
        noted.append(_meant(number))

    with _handled({signal.SIGINT: note, signal.SIGTERM: note}):
        yield lambda: noted[0] if noted else None


def _raise(number: int, frame: FrameType | None) -> None:
    raise _meant(number)


def _meant(number: int) -> BaseException:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def _handled(handlers: Mapping[int, _Handler]) -> Iterator[None]:
    """Handle these signals, but for those that are ignored, as Ctrl-C is in the background. Only a main thread can."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Those for which programs have handlers that raise."""


class _Held:
    """Signals of this process that wait until it suits the work that is being done."""

    now = False
    waiting: ClassVar[list[tuple[_Handler, int, FrameType | None]]] = []


class HeldSignals:
    """From `begin` to `end` what a program does on signals (Ctrl-C raises KeyboardInterrupt) waits for a safe point, so
    that it cannot split an update. Signals reach Python's main thread alone; in others this does nothing.
    """

    def __init__(self) -> None:
        self._begun, self._before = False, False
        self._own: dict[int, tuple[_Handler, _Handler]] = {}

    def begin(self) -> None:
        """Hold them from now on."""
        if self._begun or not _in_main_thread():
            return
        self._before, self._begun = _Held.now, True
        if not _Held.now:
            for number in _SIGNALS:
                found = signal.getsignal(number)
                if callable(found):
                    self._own[number] = found, _holding(found)
                    signal.signal(number, self._own[number][1])
            _Held.now = True

    def end(self) -> None:
        """Give the handlers back, and let them do what has been waiting. To be called again if it is broken off."""
        if not self._begun:
            return
        for number, (found, ours) in self._own.items():
            if signal.getsignal(number) is ours:  # else somebody has set another one since
                signal.signal(number, found)
        _Held.now, self._begun = self._before, False
        if not _Held.now:
            safe_point()


def safe_point() -> None:
    """Let signals that have been waiting do what they are meant to: everything is whole here."""
    if _Held.waiting and _in_main_thread():
        with signals_let_through():
            while _Held.waiting:
                handler, number, frame = _Held.waiting.pop(0)
                handler(number, frame)


class signals_let_through:  # noqa: N801 - used like a function
    """Inside, the user's own code runs, and a signal is handled at once. A class costs less than a generator."""

    def __enter__(self) -> None:
        self._main = _in_main_thread()
        if self._main:
            self._before, _Held.now = _Held.now, False

    def __exit__(self, *raised: object) -> None:
        if self._main:
            _Held.now = self._before


def _holding(found: _Handler) -> _Handler:
    def hold(number: int, frame: FrameType | None) -> None:
        if _Held.now:
            _Held.waiting.append((found, number, frame))
        else:
            found(number, frame)

    return hold


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
