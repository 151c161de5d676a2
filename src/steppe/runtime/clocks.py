"""How long something takes: on the clock on the wall, and of the processor.

Seconds on the wall count whatever else the machine was doing; seconds of the processor do not. These are the calling
thread's where torch computes with one thread, so that runs in several threads of a process do not count each other's
work; with more threads they are the whole process's, as the work is then in threads that nobody else can tell apart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch


class Time(NamedTuple):
    """Seconds on the wall, and of the processor: None where a part of them was not recorded."""

    wall: float
    cpu: float | None

    def minus(self, other: Time) -> Time:
        """What has passed since the other."""
        return Time(self.wall - other.wall, None if self.cpu is None or other.cpu is None else self.cpu - other.cpu)

    def plus(self, other: Time) -> Time:
        """Both together."""
        return Time(self.wall + other.wall, None if self.cpu is None or other.cpu is None else self.cpu + other.cpu)


NONE = Time(0.0, 0.0)


class Clock:
    """Time that passes, in addition to that of before."""

    def __init__(self, before: Time = NONE) -> None:
        self._processor = time.thread_time if torch.get_num_threads() == 1 else time.process_time
        self._before, self._started = before, self._now()

    @property
    def time(self) -> Time:
        """So far; to be asked in the thread that made the clock."""
        return self._before.plus(self._now().minus(self._started))

    def _now(self) -> Time:
        return Time(time.perf_counter(), self._processor())


def by_kind(times: Mapping[str, Time]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds on the wall, and of the processor, by kind; the latter for all kinds or for none."""
    cpu = {kind: spent.cpu for kind, spent in times.items() if spent.cpu is not None}
    return {kind: spent.wall for kind, spent in times.items()}, cpu if len(cpu) == len(times) else {}
