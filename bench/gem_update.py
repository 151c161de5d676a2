"""CPU time of one GEM update on Permuted MNIST at tasks 10 and 20, beside a plain SGD step of the same network.

    python bench/gem_update.py [--rounds 20]

One thread; the two are timed by turns in short blocks, and the fastest block of each counts, so that whatever else the
machine does weighs on both alike. Prints JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measuring import fastest
from report import report

from steppe import GEM, PMNIST, Batch, Finetune, Method
from steppe.network.network import Network
from steppe.runtime.contexts import flush_denormals
from steppe.runtime.rng import Streams

TASKS = (10, 20)


def cycling(method: Method, batches: list[Batch]) -> Callable[[], object]:
    """An update from the next batch at every call."""
    place = 0

    def update() -> object:
        nonlocal place
        place += 1
        return method.observe(batches[place % len(batches)])

    return update


def main() -> None:
    """Learn up to each task, then time updates of it."""
    parser = argparse.ArgumentParser(description="Time of a GEM update.")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    benchmark = PMNIST(test_samples=1)
    network, plain = Network(benchmark.model(0)), Network(benchmark.model(0))
    gem, sgd = GEM().start(network, {}, Streams(0)), Finetune().start(plain, {}, Streams(0))
    found = {}
    with flush_denormals():
        for number, task in enumerate(benchmark.stream(0), start=1):
            batches = [Batch(x, y, torch.full_like(y, number - 1)) for x, y in task.train.batches(10, None)]
            network.heads.add(None, 10)
            plain.heads.add(None, 10)
            gem.begin_task()
            for batch in batches:
                gem.observe(batch)
                gem.after_batch(batch)
            if number in TASKS:
                times = fastest({"gem": cycling(gem, batches), "sgd": cycling(sgd, batches)}, rounds)
                found[f"task {number}"] = {
                    "gem_ms": round(times["gem"], 3),
                    "sgd_ms": round(times["sgd"], 3),
                    "ratio": round(times["gem"] / times["sgd"], 2),
                }
            gem.end_task()
    report(**found)


if __name__ == "__main__":
    main()
