"""Wall-clock and CPU time.

Wall-clock time includes whatever else the machine was doing; CPU time does not. With one torch thread it is that of the
calling thread, so that runs in several threads of a process do not count each other's work. With more it is that of the
whole process, because the work is done by threads that no caller owns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch


class Elapsed(NamedTuple):
    """Seconds of wall-clock and of CPU time; `cpu` is None where part of it was not recorded."""

    wall: float
    cpu: float | None

    def minus(self, other: Elapsed) -> Elapsed:
        """The difference."""
        return Elapsed(self.wall - other.wall, None if self.cpu is None or other.cpu is None else self.cpu - other.cpu)

    def plus(self, other: Elapsed) -> Elapsed:
        """The sum (`+` would concatenate tuples)."""
        return Elapsed(self.wall + other.wall, None if self.cpu is None or other.cpu is None else self.cpu + other.cpu)


ZERO = Elapsed(0.0, 0.0)


class Stopwatch:
    """Measures time from its creation.

    Args:
        before: Time to add, from an interrupted part of the same work.
    """

    def __init__(self, before: Elapsed = ZERO) -> None:
        self._processor = time.thread_time if torch.get_num_threads() == 1 else time.process_time
        self._before, self._started = before, self._now()

    @property
    def elapsed(self) -> Elapsed:
        """Time so far; read it in the thread that created the stopwatch."""
        return self._before.plus(self._now().minus(self._started))

    def _now(self) -> Elapsed:
        return Elapsed(time.perf_counter(), self._processor())


def split_wall_cpu(times: Mapping[str, Elapsed]) -> tuple[dict[str, float], dict[str, float]]:
    """Split times into wall-clock and CPU seconds.

    Args:
        times: The time of each kind of work.

    Returns:
        Wall-clock and CPU seconds by kind; the latter are empty unless known for every kind.

    Example:
        >>> split_wall_cpu({"train": Elapsed(2.0, 1.0), "memory": Elapsed(3.0, None)})
        ({'train': 2.0, 'memory': 3.0}, {})
    """
    cpu = {kind: spent.cpu for kind, spent in times.items() if spent.cpu is not None}
    return {kind: spent.wall for kind, spent in times.items()}, cpu if len(cpu) == len(times) else {}
