"""Load: a thousand small tasks, a buffer of a million samples, a study of two hundred runs some of which fail.

python bench/load.py > results/bench/load.json
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measuring import resident_mb
from report import report

from steppe import ER, Learner, Task
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.study import Job, run_all
from steppe.learning.events import Event, TaskEnded
from steppe.models.mlp import MLP

FRAGILE = str(Path(__file__).with_name("fragile.py"))


def thousand_tasks(method: str) -> dict[str, Any]:
    """Resident memory after every two hundredth task of a run with its directory and checkpoints."""
    seen: dict[str, float] = {}

    def callback(event: Event) -> None:
        if isinstance(event, TaskEnded) and (event.task + 1) % 200 == 0:
            seen[f"mb_after_{event.task + 1}"] = resident_mb()

    changes = ["benchmark.tasks=1000", "benchmark.samples=20", "benchmark.test_samples=20"]
    with tempfile.TemporaryDirectory() as directory:
        result = run(RunConfig.make("pmnist", method, changes), Path(directory) / "run", callback)
    return {"method": method, **seen, "bytes_held": result.memory_bytes}


def million_samples() -> list[dict[str, Any]]:
    """Resident memory while a buffer of a million samples fills up and then goes on, 784 bytes each."""
    learner = Learner(MLP(), ER(buffer=1_000_000), seed=0)
    found = []
    generator = torch.Generator().manual_seed(0)
    for number in range(1, 16):
        x = torch.randint(0, 256, (100_000, 784), dtype=torch.uint8, generator=generator)
        learned = learner.learn(Task((x, torch.arange(len(x)) % 10)), batch_size=1000)
        if number % 3 == 0:
            row = {"samples_seen": 100_000 * number, "mb": resident_mb(), "bytes_held": learned.bytes["replay"]}
            found.append({**row, "us_per_sample": round(1e6 * learned.seconds["train"] / len(x), 1)})
    return found


def two_hundred_runs() -> dict[str, Any]:
    """How many runs of a study finish, and why the others do not."""
    changes = ["benchmark.tasks=1", "benchmark.samples=20", "benchmark.test_samples=20"]
    with tempfile.TemporaryDirectory() as directory:
        jobs = [
            Job(RunConfig.make("pmnist", "fragile", changes, seed=seed, plugins=[FRAGILE]), Path(directory) / str(seed))
            for seed in range(200)
        ]
        outcome = run_all(jobs, 2, lambda number, message: None)
    reasons = Counter(failure.reason.split(" in task")[0] for failure in outcome.failures.values())
    return {"runs": len(jobs), "finished": len(outcome.results), "failed": len(outcome.failures), "reasons": reasons}


if __name__ == "__main__":
    torch.set_num_threads(1)
    study = two_hundred_runs()
    report(study=[study], tasks=[thousand_tasks("fs-dgpm"), thousand_tasks("er")], buffer=million_samples())
