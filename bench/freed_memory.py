"""What it saves to keep freed memory: an FS-DGPM update as runs do it, and with the allocator as it is found.

    python bench/freed_memory.py [--rounds N] > results/bench/freed_memory.json

An allocator cannot be set back, so every measurement has a process of its own; they take turns, and the medians of
their medians are compared, in CPU time of one thread, the system's share included.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from typing import Any

import torch
from report import report
from update_cost import measured, reached

from steppe.fast.malloc import keep_freed_memory

NETS = ("lenet", "alexnet", "four-conv")
WAYS = ("as found", "kept")


def in_this_process(net: str, way: str, rounds: int) -> dict[str, float]:
    """Milliseconds of an update, and the most memory that the process has held."""
    if way == "kept" and not keep_freed_memory():
        sys.exit("freed memory cannot be kept here: the C library is another one, or the environment has wishes.")
    torch.set_num_threads(1)
    update = measured(net, reached(net), rounds)["update_ms"]
    return {"ms": update, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}


def by_turns(net: str, turns: int, rounds: int) -> dict[str, Any]:
    """Both ways, each in processes of its own."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            words = [sys.executable, __file__, "--net", net, "--way", way, "--rounds", str(rounds)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            found[way].append(json.loads(done.stdout))
    ms = {way: statistics.median(each["ms"] for each in found[way]) for way in WAYS}
    peak = {way: max(each["peak_mb"] for each in found[way]) for way in WAYS}
    return {
        "net": net,
        "update_ms": ms["kept"],
        "as_found_ms": ms["as found"],
        "ratio": ms["kept"] / ms["as found"],
        "peak_mb": round(peak["kept"]),
        "as_found_peak_mb": round(peak["as found"]),
    }


def main() -> None:
    """All networks with convolutions; or, asked by itself, one measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="processes for each way (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="measurements in each (default: %(default)s)")
    parser.add_argument("--net", choices=NETS, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.net:
        print(json.dumps(in_this_process(options.net, options.way, options.rounds)))
    else:
        report(updates=[by_turns(net, options.turns, options.rounds) for net in NETS])


if __name__ == "__main__":
    main()
