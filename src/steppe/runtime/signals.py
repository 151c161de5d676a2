"""Ctrl-C and SIGTERM (which `kill` and schedulers send): state that can be saved is saved before the process stops.

Two levels. The command line defers the first signal (`deferred_signals`) and stops at the next checkpoint. A learner
blocks all signals whose handlers may raise (`BlockedSignals`) and delivers them at points where its state is
consistent, so that KeyboardInterrupt never splits an update; see `steppe.runtime.session`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

StopCheck = Callable[[], BaseException | None]
"""Returns the exception to stop with once a stop was requested, else None."""

_Handler = Callable[[int, FrameType | None], None]


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops everything the way Ctrl-C does."""


def never_stop() -> None:
    """A `StopCheck` that never requests a stop."""


@contextmanager
def raise_on_termination() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM inside, so that files are closed and temporary ones removed."""
    with _handlers_installed({signal.SIGTERM: _raise}):
        yield


@contextmanager
def deferred_signals() -> Iterator[StopCheck]:
    """Only record the first SIGINT or SIGTERM inside; the second one raises at once.

    Yields:
        A function that returns the recorded exception, or None: call it where the work can be saved.
    """
    recorded: list[BaseException] = []

    def record(number: int, frame: FrameType | None) -> None:
        if recorded:
            _raise(number, frame)
        recorded.append(_exception_for(number))

    with _handlers_installed({signal.SIGINT: record, signal.SIGTERM: record}):
        yield lambda: recorded[0] if recorded else None


def _raise(number: int, frame: FrameType | None) -> None:
    raise _exception_for(number)


def _exception_for(number: int) -> BaseException:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def _handlers_installed(handlers: Mapping[int, _Handler]) -> Iterator[None]:
    """Install handlers, except for signals that are ignored, as SIGINT is in a background job. Only the main thread
    can.
    """
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
"""Signals for which programs install handlers that raise."""


class _Blocking:
    """Whether this process's signals are blocked, and which of them are pending."""

    active = False
    pending: ClassVar[list[tuple[_Handler, int, FrameType | None]]] = []


class BlockedSignals:
    """Blocks signals from `block` to `unblock`: their handlers run at the next `deliver_pending_signals`.

    As with POSIX signal masks, a blocked signal stays pending; unlike them, this works on Python's handlers, so that
    long calls into torch need no attention. Signals reach Python's main thread alone; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._begun, self._before = False, False
        self._handlers: dict[int, tuple[_Handler, _Handler]] = {}

    def block(self) -> None:
        """Block them from now on."""
        if self._begun or not _in_main_thread():
            return
        self._before, self._begun = _Blocking.active, True
        if not _Blocking.active:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler, _blocking_handler(handler)
                    signal.signal(number, self._handlers[number][1])
            _Blocking.active = True

    def unblock(self) -> None:
        """Restore the handlers and deliver what is pending; can be called again after an exception."""
        if not self._begun:
            return
        for number, (handler, ours) in self._handlers.items():
            if signal.getsignal(number) is ours:  # else the user has installed another one since
                signal.signal(number, handler)
        _Blocking.active, self._begun = self._before, False
        if not _Blocking.active:
            deliver_pending_signals()


def deliver_pending_signals() -> None:
    """Run the handlers of pending signals; call it where all state is consistent, since they may raise."""
    if _Blocking.pending and _in_main_thread():
        with signals_unblocked():
            while _Blocking.pending:
                handler, number, frame = _Blocking.pending.pop(0)
                handler(number, frame)


class signals_unblocked:  # noqa: N801 - used like a function
    """Handle signals at once inside, where the user's own code runs. A class costs less than a generator."""

    def __enter__(self) -> None:
        self._main = _in_main_thread()
        if self._main:
            self._before, _Blocking.active = _Blocking.active, False

    def __exit__(self, *raised: object) -> None:
        if self._main:
            _Blocking.active = self._before


def _blocking_handler(handler: _Handler) -> _Handler:
    def handle(number: int, frame: FrameType | None) -> None:
        if _Blocking.active:
            _Blocking.pending.append((handler, number, frame))
        else:
            handler(number, frame)

    return handle


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
