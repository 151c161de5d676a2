"""Whether learning stays as quick and as small however long the stream: time and memory per task, and of replay.

    python bench/growth.py [--tasks N] [--methods METHOD ...]

A synthetic stream of small tasks with one head, learnt one after another: median CPU time of the tasks at its
beginning (from the second on), in its middle and at its end; the bytes the method holds, and the process's memory, at
the same places. Then the cost of a draw and of a push of ten samples from reservoirs of growing size. Prints JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from measuring import fastest, resident_mb
from report import report

from steppe import Batch, Learner, Task
from steppe.experiments.config import RunConfig
from steppe.methods.parts.reservoir import Reservoir
from steppe.models.mlp import MLP

INPUTS, SAMPLES = 64, 60


def stream(name: str, count: int) -> dict[str, Any]:
    """Learn so many tasks."""
    settings = RunConfig.make("pmnist", name).method_settings
    learner = Learner(MLP(INPUTS, 100, 10), settings)
    seconds, held, memory = [], [], []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        x = torch.randint(256, (SAMPLES, INPUTS), generator=generator, dtype=torch.uint8)
        task = Task((x, torch.arange(SAMPLES) % 10))
        started = time.process_time()
        learnt = learner.learn(task, batch_size=10, updates_per_batch=2)
        seconds.append(time.process_time() - started)
        held.append(sum(learnt.bytes.values()))
        memory.append(resident_mb())
    part = count // 5
    places = {"begin": slice(1, 1 + part), "middle": slice(2 * part, 3 * part), "end": slice(count - part, count)}
    return {
        "method": name,
        "tasks": count,
        **{f"ms_per_task_{place}": 1e3 * statistics.median(seconds[where]) for place, where in places.items()},
        **{f"resident_mb_{place}": memory[where][-1] for place, where in places.items()},
        "bytes_held": held[-1],
    }


def replay(size: int) -> dict[str, float]:
    """Microseconds of a draw and of a push of ten samples with a full buffer of this size."""
    reservoir = Reservoir(size, random.Random(0), random.Random(1))
    batch = Batch(torch.zeros(10, 32, dtype=torch.uint8), torch.zeros(10, dtype=torch.int64), torch.zeros(10).long())
    large = Batch(torch.zeros(size, 32, dtype=torch.uint8), torch.zeros(size).long(), torch.zeros(size).long())
    reservoir.add(large)
    works = {"draw_us": lambda: reservoir.sample(10), "push_us": lambda: reservoir.add(batch)}
    times = fastest(works, rounds=20, block=100)
    return {"size": size, "bytes": reservoir.memory_bytes(), **{name: 1e3 * ms for name, ms in times.items()}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=200, help="length of the stream (default: 200)")
    parser.add_argument("--methods", nargs="+", default=["fs-dgpm", "gpm", "er"], metavar="METHOD")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report(
        streams=[stream(name, options.tasks) for name in options.methods],
        replay=[replay(10**power) for power in (2, 3, 4, 5, 6)],
    )


if __name__ == "__main__":
    main()
