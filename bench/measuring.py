"""How benchmarks measure: CPU time by turns, and the process's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def fastest(works: Mapping[str, Callable[[], object]], rounds: int, block: int = 20) -> dict[str, float]:
    """Milliseconds of CPU time per call: timed by turns in blocks of so many calls, the fastest block of each."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            started = time.process_time()
            for _ in range(block):
                work()
            best[name] = min(best[name], (time.process_time() - started) / block * 1e3)
    return best


def resident_mb() -> float:
    """What the process holds in memory now, in megabytes of a million bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
