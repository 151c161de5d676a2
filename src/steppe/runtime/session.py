"""One call into a learner: what it changes in the process and in the model, and how all of that is put back.

The protocol, from the outside in:

1. Signals are blocked (`signals.BlockedSignals`), so that Ctrl-C cannot split an update.
2. The learner's `FairLock` is acquired: its calls run one at a time.
3. torch's global generators run the learner's streams (`rng.GlobalRNG`, which holds `GLOBAL_RNG_LOCK`), and torch's
   number of threads may be changed.

Between two steps the work calls `yield_point`: pending signals are delivered, and waiting threads get the locks. While
the user's code runs (a callback), 2 and 3 are released and signals are unblocked.

An exception may still strike anywhere, because another thread can raise one in this thread. So every change is noted
before it is made, every step of cleaning up can be repeated, and cleaning up is tried twice: the exception that splits
the first attempt is over when the second one starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from steppe.runtime.contexts import restore_denormals
from steppe.runtime.locks import FairLock
from steppe.runtime.rng import GLOBAL_RNG_LOCK, GlobalRNG
from steppe.runtime.signals import BlockedSignals, deliver_pending_signals, signals_unblocked
from steppe.runtime.threads import set_num_threads

Result = TypeVar("Result")
_CURRENT = threading.local()
_CONTEXT_FILES = {"contextlib.py", "grad_mode.py", "autocast_mode.py"}
"""Where Python's and torch's context managers are implemented."""


class Session:
    """One call into a learner.

    Args:
        model: The model, whose modes, hooks and `forward` are repaired after an exception.
        lock: The learner's lock.
    """

    def __init__(self, model: nn.Module, lock: FairLock) -> None:
        self._signals, self._lock = BlockedSignals(), lock
        self._depth, self._rng_depth = lock.depth, GLOBAL_RNG_LOCK.depth
        self._rng: GlobalRNG | None = None
        self._threads: int | None = None  # the caller's
        self._flags = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        self._modes: list[tuple[nn.Module, bool]] = []
        self._model, self._failed = model, False

    def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` while holding the learner's lock, with signals blocked, and clean up however it ends."""
        outer = getattr(_CURRENT, "session", None)
        try:
            self._signals.block()
            self._lock.acquire()
            self._modes = [(module, module.training) for module in self._model.modules()]
            _CURRENT.session = self
            return work()
        except BaseException as error:
            self._failed = True
            _close_contexts(error.__traceback__)
            raise
        finally:
            try:
                self._clean_up(outer)
            finally:
                self._clean_up(outer)

    def use_global_rng(self, rng: GlobalRNG) -> None:
        """Let torch's global generators run `rng` until the session ends."""
        self._rng = rng
        rng.acquire()

    def set_num_threads(self, count: int) -> None:
        """Let torch use `count` threads until the session ends."""
        before = torch.get_num_threads()
        if self._threads is None:
            self._threads = before
        set_num_threads(count)

    def yield_to_waiters(self, *, learner: bool) -> None:
        """Hand the global generators to a thread that waits for them, and with `learner` the learner, too."""
        if self._depth > 0 or self._rng_depth > 0:  # nested in another session, which holds them
            return
        rng_wanted = self._rng is not None and GLOBAL_RNG_LOCK.has_waiters and GLOBAL_RNG_LOCK.depth == 1
        if learner and self._lock.depth == 1 and (rng_wanted or self._lock.has_waiters):
            self._release()
            self._reacquire(None)
        elif rng_wanted and self._rng is not None:
            self._rng.release()
            self._rng.acquire()

    def run_user_code(self, call: Callable[[], Result]) -> Result:
        """Run the user's code with the process as the user left it: generators, threads, signals; the learner free."""
        ours = self._release()
        try:
            with signals_unblocked():
                return call()
        finally:
            self._reacquire(ours)

    def _release(self) -> int | None:
        """Release everything but signals; returns our number of threads, if it differs from the caller's."""
        ours = None
        if self._threads is not None:
            ours = set_num_threads(self._threads)
        if self._rng is not None:
            self._rng.release()
        self._lock.release_to(self._depth)
        return ours

    def _reacquire(self, threads: int | None) -> None:
        self._lock.acquire()
        if self._rng is not None:
            self._rng.acquire()
        if threads is not None:
            self._threads = set_num_threads(threads)

    def _clean_up(self, outer: Session | None) -> None:
        if self._failed:
            self._repair()
            if outer is None:
                restore_denormals()
        if self._rng is not None:
            self._rng.release()
        if self._threads is not None:
            set_num_threads(self._threads)
        GLOBAL_RNG_LOCK.release_to(self._rng_depth)
        self._lock.release_to(self._depth)
        _CURRENT.session = outer
        self._signals.unblock()

    def _repair(self) -> None:
        """Undo what the contexts inside left behind if the exception interrupted their cleanup."""
        torch.set_grad_enabled(self._flags[0])
        torch.set_autocast_cache_enabled(self._flags[1])
        for module, training in self._modes:
            module.training = training
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key in [key for key, hook in hooks.items() if _defined_in_steppe(hook)]:
                    del hooks[key]
                    module._forward_hooks_with_kwargs.pop(key, None)
            if _defined_in_steppe(getattr(vars(module).get("forward"), "func", None)):
                del module.forward


def yield_point(*, learner: bool = False) -> None:
    """Deliver pending signals and let waiting threads run. Call it between two steps of long work, where all state is
    consistent.

    Args:
        learner: Whether the learner itself can be used here by another thread, rather than the global generators alone.
    """
    deliver_pending_signals()
    session: Session | None = getattr(_CURRENT, "session", None)
    if session is not None:
        session.yield_to_waiters(learner=learner)


def _defined_in_steppe(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("steppe.")


def _close_contexts(trace: TracebackType | None) -> None:
    """Close now the context managers that the exception interrupted while they were entered: their generators live in
    frames that the traceback keeps alive.
    """
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name in _CONTEXT_FILES:
            trace.tb_frame.clear()
        trace = trace.tb_next
