"""Whether the seeds of a small network, stacked into one batched run, would beat runs side by side.

    python bench/stacked_seeds.py [--rounds N]

A hand-written replay step of the Permuted MNIST network (20 samples: forward, backward, momentum) for one seed, and the
same for several at once with batched products. Stacking pays on two cores if S seeds together cost less than S / 2
times one. CPU time of one thread, the fastest block of each, by turns. Prints JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measuring import fastest
from report import report
from torch import Tensor

from steppe.fast.matmul import times_transposed
from steppe.runtime.contexts import flush_denormals

SAMPLES, SIZES, LR, MOMENTUM = 20, ((100, 784), (100, 100), (10, 100)), 0.01, 0.9


def one() -> Callable[[], None]:
    """The step for one seed."""
    x, y = torch.rand(SAMPLES, 784), torch.randint(10, (SAMPLES, 1))
    minus = torch.full((SAMPLES, 1), -1.0)
    weights = [torch.randn(size) / size[1] ** 0.5 for size in SIZES]
    velocities = [torch.zeros_like(weight) for weight in weights]

    def step() -> None:
        first = torch.relu(times_transposed(x, weights[0]))
        second = torch.relu(first @ weights[1].t())
        slope = torch.softmax(second @ weights[2].t(), 1).scatter_add_(1, y, minus).div_(SAMPLES)
        middle = (slope @ weights[2]).mul_(second > 0)
        lowest = (middle @ weights[1]).mul_(first > 0)
        for velocity, weight, left, right in zip(
            velocities, weights, (lowest, middle, slope), (x, first, second), strict=True
        ):
            weight.sub_(velocity.addmm_(left.t(), right, beta=MOMENTUM), alpha=LR)

    return step


def stacked(seeds: int) -> Callable[[], None]:
    """The same for several seeds at once."""
    x, y = torch.rand(seeds, SAMPLES, 784), torch.randint(10, (seeds, SAMPLES, 1))
    minus = torch.full((seeds, SAMPLES, 1), -1.0)
    weights: list[Tensor] = [torch.randn(seeds, *size) / size[1] ** 0.5 for size in SIZES]
    velocities = [torch.zeros_like(weight) for weight in weights]

    def step() -> None:
        first = torch.relu(torch.bmm(x, weights[0].mT))
        second = torch.relu(torch.bmm(first, weights[1].mT))
        slope = torch.softmax(torch.bmm(second, weights[2].mT), 2).scatter_add_(2, y, minus).div_(SAMPLES)
        middle = torch.bmm(slope, weights[2]).mul_(second > 0)
        lowest = torch.bmm(middle, weights[1]).mul_(first > 0)
        for velocity, weight, left, right in zip(
            velocities, weights, (lowest, middle, slope), (x, first, second), strict=True
        ):
            weight.sub_(velocity.baddbmm_(left.mT, right, beta=MOMENTUM), alpha=LR)

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="blocks of each (default: 60)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    works: dict[str, Callable[[], None]] = {"1": one(), **{str(seeds): stacked(seeds) for seeds in (2, 3, 5)}}
    with torch.no_grad(), flush_denormals():
        times = fastest(works, rounds)
    found = [{"seeds": int(seeds), "ms": ms, "times_one": ms / times["1"]} for seeds, ms in times.items()]
    report(steps=found)


if __name__ == "__main__":
    main()
