"""A learner at work: all that it changes in the process and in its model for a while, and gives back in any case.

Whatever is raised may strike between any two steps: Ctrl-C waits for a safe point (`signals`), but an exception that
another thread raises in this one does not. So what is changed is noted before it is, every step of giving back can be
taken again, and giving back is tried twice: what splits the first attempt is over when the second is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from steppe.runtime.rng import Borrowed
from steppe.runtime.signals import HeldSignals, safe_point, signals_let_through
from steppe.runtime.threads import use_threads
from steppe.runtime.turns import GENERATORS, Turn

Result = TypeVar("Result")
_AT_WORK = threading.local()
_CONTEXTS = {"contextlib.py", "grad_mode.py", "autocast_mode.py"}
"""The files of what goes in and out of contexts: Python's, and torch's own."""


class Session:
    """One call of a learner: `run` does its work."""

    def __init__(self, model: nn.Module, turn: Turn) -> None:
        self._signals, self._turn = HeldSignals(), turn
        self._depth, self._lent_depth = turn.depth, GENERATORS.depth
        self._borrowed: Borrowed | None = None
        self._threads: int | None = None  # of the caller
        self._flags = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        self._modes: list[tuple[nn.Module, bool]] = []
        self._model, self._broken = model, False

    def run(self, work: Callable[[], Result]) -> Result:
        """Do some work, alone with the learner."""
        before = getattr(_AT_WORK, "session", None)
        try:
            self._signals.begin()
            self._turn.take()
            self._modes = [(module, module.training) for module in self._model.modules()]
            _AT_WORK.session = self
            return work()
        except BaseException as error:
            self._broken = True
            _close_contexts(error.__traceback__)
            raise
        finally:
            try:
                self._end(before)
            finally:
                self._end(before)

    def borrow(self, borrowed: Borrowed) -> None:
        """Let torch's global generators run the learner's sequence until the work is done."""
        self._borrowed = borrowed
        borrowed.begin()

    def use_threads(self, count: int) -> None:
        """Let torch use so many threads until the work is done."""
        found = torch.get_num_threads()
        if self._threads is None:
            self._threads = found
        use_threads(count)

    def give_way(self, *, learner: bool) -> None:
        """Where somebody waits to work as this one does, or for the `learner` where it can be used, let him."""
        if self._depth > 0 or self._lent_depth > 0:  # within other work, whose turn it is
            return
        lent = self._borrowed is not None and GENERATORS.is_wanted and GENERATORS.depth == 1
        if learner and self._turn.depth == 1 and (lent or self._turn.is_wanted):
            self._lend()
            self._resume(None)
        elif lent and self._borrowed is not None:
            self._borrowed.end()
            self._borrowed.begin()

    def let_user(self, call: Callable[[], Result]) -> Result:
        """Run code of the user's, which finds the process as it is without us: generators, threads, signals."""
        ours = self._lend()
        try:
            with signals_let_through():
                return call()
        finally:
            self._resume(ours)

    def _lend(self) -> int | None:
        ours = None
        if self._threads is not None:
            ours = use_threads(self._threads)
        if self._borrowed is not None:
            self._borrowed.end()
        self._turn.reduce_to(self._depth)
        return ours

    def _resume(self, threads: int | None) -> None:
        self._turn.take()
        if self._borrowed is not None:
            self._borrowed.begin()
        if threads is not None:
            self._threads = use_threads(threads)

    def _end(self, before: Session | None) -> None:
        if self._broken:
            self._put_back()
        if self._borrowed is not None:
            self._borrowed.end()
        if self._threads is not None:
            use_threads(self._threads)
        GENERATORS.reduce_to(self._lent_depth)
        self._turn.reduce_to(self._depth)
        _AT_WORK.session = before
        self._signals.end()

    def _put_back(self) -> None:
        """What the contexts inside have left behind, if their own giving back was split."""
        torch.set_grad_enabled(self._flags[0])
        torch.set_autocast_cache_enabled(self._flags[1])
        for module, training in self._modes:
            module.training = training
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[key]
                    module._forward_hooks_with_kwargs.pop(key, None)
            if _is_ours(getattr(vars(module).get("forward"), "func", None)):
                del module.forward


def breathe(*, learner: bool = False) -> None:
    """A point between two steps of long work, where everything is whole: signals that came are handled, and threads
    that wait have their turn; those that wait for the same learner only where it is said that it can be used.
    """
    safe_point()
    session: Session | None = getattr(_AT_WORK, "session", None)
    if session is not None:
        session.give_way(learner=learner)


def _is_ours(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("steppe.")


def _close_contexts(trace: TracebackType | None) -> None:
    """Leave the contexts now that were entered when the exception struck, and not yet left behind by anybody: they hang
    on frames that the exception keeps.
    """
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name in _CONTEXTS:
            trace.tb_frame.clear()
        trace = trace.tb_next
