from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from steppe.runtime.signals import Terminated, deferred_signals, raise_on_termination


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    """As in a program of its own: tests in the background inherit SIGINT ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "meant"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_the_first_signal_is_noted_and_the_second_ends_it(number: signal.Signals, meant: type[BaseException]) -> None:
    with deferred_signals() as stop:
        assert stop() is None
        signal.raise_signal(number)
        assert type(stop()) is meant
        with pytest.raises(meant):
            signal.raise_signal(number)
        assert type(stop()) is meant


def test_termination_is_raised_as_ctrl_c_is() -> None:
    with pytest.raises(Terminated), raise_on_termination():
        signal.raise_signal(signal.SIGTERM)
    assert issubclass(Terminated, KeyboardInterrupt)


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with raise_on_termination(), deferred_signals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop() is None


def test_other_threads_leave_signals_alone() -> None:
    """Only the main thread may handle them: a run elsewhere is not refused for that."""
    found: list[object] = []

    def elsewhere() -> None:
        with raise_on_termination(), deferred_signals() as stop:
            found.append(stop())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [None]
