"""What one update of a method costs on Permuted MNIST, in plain SGD steps of the same network.

    python bench/pmnist_update.py [METHOD ...] [--tasks N] [--rounds N]

A plain step is the usual loop by hand: forward, cross-entropy, backward and `torch.optim.SGD` with momentum on a batch
of 10 that lies ready. An update is `Method.observe` on a stored batch of 10, after N tasks of the benchmark have been
learnt with their five glances, so that buffer and bases are those of a real run. One thread, denormals flushed, CPU
time; both are timed by turns in short blocks, and the fastest block of each counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from measuring import fastest
from report import report
from torch.nn.functional import cross_entropy

from steppe import PMNIST, Batch, Learner, Task
from steppe.experiments.config import RunConfig
from steppe.runtime.contexts import flush_denormals


def batches(task: Task) -> list[Batch]:
    """Stored batches of ten."""
    return [Batch(x, y, torch.zeros_like(y)) for x, y in task.train.batches(10, None)]


def plain_step(task: Task) -> Callable[[], None]:
    """The loop by hand."""
    model = PMNIST().model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ready = [(batch.x.float() / 255, batch.y) for batch in batches(task)]
    place = 0

    def step() -> None:
        nonlocal place
        x, y = ready[place % len(ready)]
        place += 1
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def update(name: str, learnt: int) -> tuple[Callable[[], None], dict[str, int]]:
    """The method's update in the middle of a run, and the ranks of its bases."""
    config = RunConfig.make("pmnist", name, [f"benchmark.tasks={learnt + 1}", "test_samples=1"])
    tasks = config.benchmark_settings.stream(0)
    learner = Learner(config.benchmark_settings.model(0), config.method_settings)
    for task in tasks[:-1]:
        learner.learn(task, batch_size=10, updates_per_batch=5)
    method = learner.validate(tasks[-1])
    learner.network.heads.add(None, 10)
    method.begin_task()
    ready = [Batch(batch.x, batch.y, batch.task + learnt) for batch in batches(tasks[-1])]
    place = 0

    def observe() -> None:
        nonlocal place
        method.observe(ready[place % len(ready)])
        place += 1

    ranks: dict[str, Any] = method.diagnostics().get("ranks", {})
    return observe, {layer: entry["rank"] for layer, entry in ranks.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", default=["fs-dgpm", "fs-sgpm", "fs-rgpm", "er", "gpm"], metavar="METHOD")
    parser.add_argument("--tasks", type=int, default=19, help="tasks learnt before (default: 19, the most)")
    parser.add_argument("--rounds", type=int, default=60, help="blocks of each (default: 60)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = {name: update(name, options.tasks) for name in options.methods}
    works = {"plain": plain_step(PMNIST(tasks=1).stream(0)[0]), **{name: work for name, (work, _) in made.items()}}
    with flush_denormals():
        times = fastest(works, options.rounds)
    found = [
        {
            "method": name,
            "ms": times[name],
            "plain_steps": times[name] / times["plain"],
            "ranks": ", ".join(map(str, made[name][1].values())),
        }
        for name in options.methods
    ]
    report(num_tasks=options.tasks, plain_ms=times["plain"], updates=found)


if __name__ == "__main__":
    main()
