"""How every benchmark reports: JSON on standard output, with command, versions, machine and the machine's own rate."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from steppe.runtime.environment import machine_info
from steppe.version import versions


def gemm_rate() -> float:
    """The machine's own rate at a large matrix product on one thread, in GFLOP/s."""
    a = torch.randn(1024, 1024)
    times = []
    for _ in range(12):
        started = time.process_time()
        torch.mm(a, a)
        times.append(time.process_time() - started)
    return 2 * 1024**3 / statistics.median(times[2:]) / 1e9


def report(**found: Any) -> None:
    """Print what was found."""
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    described = {"command": command, "threads": torch.get_num_threads(), "gemm_gflops": gemm_rate()}
    print(json.dumps({**described, "versions": versions(), "machine": machine_info(), **found}, indent=1))
