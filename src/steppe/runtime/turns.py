"""Turns: what one thread at a time may use, in the order of asking.

torch's global generators are such a thing. Dropout draws from nothing else, so a learner lends its own stream to them
while it works (`rng`), and two learners in two threads take turns, update by update.
"""

from __future__ import annotations

import threading
from collections import deque


class Turn:
    """Held by one thread at a time; a thread that has it may take it again within."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # of C: `with` cannot be split by whatever is raised from outside
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def __deepcopy__(self, memo: object) -> Turn:
        """A copied learner has turns of its own."""
        return Turn()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        """So has one that is sent to another process."""
        return Turn, ()

    @property
    def depth(self) -> int:
        """How often this thread has taken it."""
        return self._depth if self._owner == threading.get_ident() else 0

    @property
    def is_wanted(self) -> bool:
        """Whether another thread waits for it."""
        return bool(self._waiting)

    def take(self, times: int = 1) -> None:
        """Take it, after everybody who asked before."""
        me = threading.get_ident()
        with self._mutex:
            if self._owner == me or self._owner is None:
                self._owner, self._depth = me, self.depth + times
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((me, gate))
        try:
            gate.acquire()  # opened by whoever had it before
        except BaseException:
            self._no_longer_wait(me, gate)
            raise
        self._depth = times

    def give(self) -> None:
        """Give it back once."""
        self.reduce_to(self.depth - 1)

    def reduce_to(self, depth: int) -> None:
        """Give it back until it is held only so often; nothing where it is not held more often than that."""
        if self.depth <= depth:
            return
        with self._mutex:
            if depth > 0:
                self._depth = depth
            else:
                self._pass_on()

    def _pass_on(self) -> None:
        self._owner, self._depth = None, 0
        if self._waiting:
            self._owner, gate = self._waiting.popleft()
            self._depth = 1
            gate.release()

    def _no_longer_wait(self, me: int, gate: threading.Lock) -> None:
        with self._mutex:
            if (me, gate) in self._waiting:
                self._waiting.remove((me, gate))
            elif self._owner == me:  # it had come to us just now
                self._pass_on()


GENERATORS = Turn()
"""Whose streams torch's global generators run."""
