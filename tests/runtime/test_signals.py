from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from steppe.runtime.signals import Terminated, deferred_signals, raise_on_termination


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    """As in a program of its own: background tests inherit an ignored SIGINT."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "meant"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_first_signal_is_recorded_and_second_raises(number: signal.Signals, meant: type[BaseException]) -> None:
    with deferred_signals() as stop:
        assert stop() is None
        signal.raise_signal(number)
        assert type(stop()) is meant
        with pytest.raises(meant):
            signal.raise_signal(number)
        assert type(stop()) is meant


def test_sigterm_raises_like_ctrl_c() -> None:
    with pytest.raises(Terminated), raise_on_termination():
        signal.raise_signal(signal.SIGTERM)
    assert issubclass(Terminated, KeyboardInterrupt)


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with raise_on_termination(), deferred_signals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop() is None


def test_other_threads_do_not_change_handlers() -> None:
    """Only the main thread may set them, but runs in other threads work."""
    found: list[object] = []

    def elsewhere() -> None:
        with raise_on_termination(), deferred_signals() as stop:
            found.append(stop())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [None]
