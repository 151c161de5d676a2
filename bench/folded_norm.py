"""What folding saves LeNet's BatchNorm on several threads: an FS-DGPM update as it is, and with torch's own.

torch's own is also timed alone, forward and backward, on one thread and on several.

    python bench/folded_norm.py [--threads N] [--rounds N] > results/bench/folded_norm.json

Both are timed in turn, by the clock on the wall, and the medians are compared. Nothing else should run meanwhile: it
would take a processor from one of the threads, and the others would wait for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from report import report
from torch import nn
from update_cost import AtWork, at_work, reached

from steppe.fast.malloc import keep_freed_memory
from steppe.runtime.contexts import flush_denormals


def with_torch_s(found: AtWork) -> AtWork:
    """The same with torch's own BatchNorm in the place of each."""
    for name, module in list(found.network.model.named_children()):
        if isinstance(module, nn.BatchNorm2d):
            own = nn.BatchNorm2d(module.num_features)
            own.weight, own.bias = module.weight, module.bias  # the very parameters that the learner knows
            setattr(found.network.model, name, own)
    return found


def measured(threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of an update either way, and their ratio."""
    torch.set_num_threads(threads)
    ranks = reached("lenet")
    ways = (at_work("lenet", ranks), with_torch_s(at_work("lenet", ranks)))
    spent: tuple[list[float], ...] = ([], [])
    with flush_denormals(), ways[0].network.mode(training=True), ways[1].network.mode(training=True):
        for turn in range(rounds + 2):
            for way, times in zip(ways, spent, strict=True):
                started = time.perf_counter()
                way.update()
                if turn >= 2:  # the first two warm up
                    times.append(1e3 * (time.perf_counter() - started))
    folded, own = (statistics.median(times) for times in spent)
    return {"threads": threads, "update_ms": folded, "torch_ms": own, "ratio": folded / own}


def alone(threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of torch's own as LeNet's first convolution is followed by it, 64 images of 20 channels."""
    torch.set_num_threads(threads)
    norm = nn.BatchNorm2d(20)
    x = torch.randn(64, 20, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    given, times = torch.randn_like(x), []
    for turn in range(rounds + 2):
        started = time.perf_counter()
        torch.autograd.grad(norm(x), [x, norm.weight, norm.bias], given)
        if turn >= 2:
            times.append(1e3 * (time.perf_counter() - started))
    return {"threads": threads, "torch_ms": statistics.median(times)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="as many as there are processors (default: 2)")
    parser.add_argument("--rounds", type=int, default=25, help="how often each is timed (default: %(default)s)")
    options = parser.parse_args()
    keep_freed_memory()
    layers = [alone(threads, options.rounds) for threads in (1, options.threads)]
    report(updates=[measured(options.threads, options.rounds)], layers=layers)


if __name__ == "__main__":
    main()
