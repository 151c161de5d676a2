"""Being asked to stop, by Ctrl-C or SIGTERM (which `kill` and schedulers send): what can be kept is kept first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Stop = Callable[[], BaseException | None]
"""What to stop with, if one was asked to; None as long as nobody has."""

_Handler = Callable[[int, FrameType | None], None]


class Terminated(KeyboardInterrupt):
    """SIGTERM: everything stops as it does by Ctrl-C."""


def never() -> None:
    """Nobody asks to stop."""


@contextmanager
def termination_raised() -> Iterator[None]:
    """Meanwhile SIGTERM raises `Terminated`, so that whatever is open gets closed."""
    with _handled({signal.SIGTERM: _raise}):
        yield


@contextmanager
def first_noted() -> Iterator[Stop]:
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
