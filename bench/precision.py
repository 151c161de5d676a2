"""What mixed precision saves: an FS-DGPM update with products in bfloat16, against the same in float32, in one run.

    python bench/precision.py [--rounds N] > results/bench/precision.json

CPU time of one thread, by turns, medians; freed memory is kept, as in runs. Then what rounding leaves of a perturbation
v, one step of ascent: how many weights it moves, how far all of them together go along v, how much the loss rises.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from report import report
from update_cost import AtWork, at_work, in_turn, reached

from steppe.fast.factored import to_dense
from steppe.fast.malloc import keep_freed_memory
from steppe.runtime.contexts import flush_denormals, gc_frozen

NETS = ("lenet", "alexnet", "four-conv")


def measured(net: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of an update in either precision."""
    found = at_work(net, reached(net))

    def mixed() -> None:
        with found.network.autocast_to("bfloat16"):
            found.update()

    with flush_denormals(), gc_frozen(), found.network.mode(training=True):
        whole, half = in_turn((found.update, mixed), rounds)
    times = {"float32_ms": whole, "bfloat16_ms": half, "times_faster": whole / half}
    return {"net": net, **times, **perturbed(found)}


def perturbed(found: AtWork) -> dict[str, float]:
    """What is left of v once w + v is rounded to bfloat16."""
    network, current = found.network, found.network.prepare(found.batch)
    _, gradient = network.loss_and_grad(current, statistics=False)
    v = {name: found.method.settings.ascent_lr * to_dense(g) for name, g in gradient.items()}
    place = network.scratch.perturbed(v)
    left = {
        name: place[name].bfloat16().float() - p.detach().bfloat16().float() for name, p in network.trainable.items()
    }
    moved = sum(int((d != 0).sum()) for d in left.values()) / sum(d.numel() for d in left.values())
    along = sum(float((left[name] * v[name]).sum()) for name in v) / sum(float((d * d).sum()) for d in v.values())
    rises = {}
    with network.mode(training=False):
        for precision in ("float32", "bfloat16"):
            with network.autocast_to(precision):
                before, after = (network.loss_and_grad(current, at=at, statistics=False)[0] for at in (None, place))
            rises[f"{precision}_rise"] = float(after - before)
    return {"weights_moved": moved, "along_v": along, **rises}


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
