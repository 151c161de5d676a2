"""What mixed precision saves: an FS-DGPM update with products in bfloat16, against the same in float32, in one run.

    python bench/precision.py [--rounds N] > results/bench/precision.json

CPU time of one thread, by turns, medians; freed memory is kept, as in runs.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from report import report
from update_cost import at_work, in_turn, reached

from steppe.allocation import keep_freed_memory
from steppe.numerics import denormals_flushed, loaded_left_alone

NETS = ("lenet", "alexnet", "four-conv")


def measured(net: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of an update in either precision."""
    found = at_work(net, reached(net))

    def mixed() -> None:
        with found.network.multiplying_in("bfloat16"):
            found.update()

    with denormals_flushed(), loaded_left_alone(), found.network.mode(training=True):
        whole, half = in_turn((found.update, mixed), rounds)
    return {"net": net, "float32_ms": whole, "bfloat16_ms": half, "times_faster": whole / half}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="how often each is timed (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    report(updates=[measured(net, options.rounds) for net in NETS])


if __name__ == "__main__":
    main()
