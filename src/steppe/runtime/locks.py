"""A fair lock: threads acquire it in the order in which they requested it.

Each learner has one, so that its calls run one at a time. `rng.GLOBAL_RNG_LOCK` protects torch's global generators, so
that learners in several threads alternate update by update. A plain `threading.RLock` would let a thread that releases
and reacquires starve the others.
"""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A reentrant first-come, first-served lock.

    `release` hands the lock straight to the next thread in line, so that the releasing thread cannot take it again
    first. An exception raised in a waiting thread removes it from the line.

    Example:
        >>> lock = FairLock()
        >>> lock.acquire()
        >>> lock.acquire()
        >>> lock.depth
        2
        >>> lock.release_to(0)
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # written in C: an exception from another thread cannot split its `with`
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def __deepcopy__(self, memo: object) -> FairLock:
        """A copy is a new, free lock."""
        return FairLock()

    def __reduce__(self) -> tuple[type[FairLock], tuple[()]]:
        """A pickled lock is a new, free lock."""
        return FairLock, ()

    @property
    def depth(self) -> int:
        """How many times the calling thread holds it."""
        return self._depth if self._owner == threading.get_ident() else 0

    @property
    def has_waiters(self) -> bool:
        """Whether another thread is waiting for it."""
        return bool(self._waiting)

    def acquire(self) -> None:
        """Release it to the threads that are waiting already, and acquire it again."""
        me = threading.get_ident()
        with self._mutex:
            if self._owner == me or self._owner is None:
                self._owner, self._depth = me, self.depth + 1
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((me, gate))
        try:
            gate.acquire()  # opened by the thread that hands the lock over
        except BaseException:
            self._stop_waiting(me, gate)
            raise

    def release(self) -> None:
        """Release it once."""
        self.release_to(self.depth - 1)

    def release_to(self, depth: int) -> None:
        """Release it until the calling thread holds it `depth` times; do nothing if it holds it no more than that."""
        if self.depth <= depth:
            return
        with self._mutex:
            if depth > 0:
                self._depth = depth
            else:
                self._hand_over()

    def _hand_over(self) -> None:
        self._owner, self._depth = None, 0
        if self._waiting:
            self._owner, gate = self._waiting.popleft()
            self._depth = 1
            gate.release()

    def _stop_waiting(self, me: int, gate: threading.Lock) -> None:
        with self._mutex:
            if (me, gate) in self._waiting:
                self._waiting.remove((me, gate))
            elif self._owner == me:  # it was handed to us just now
                self._hand_over()
