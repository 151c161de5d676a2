"""Run directories with synthetic numbers, for figures; nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steppe.experiments.run_directory import read_result
from steppe.landscape.bound import NoisyLoss
from steppe.landscape.files import Landscape, Pair, identities
from steppe.landscape.flatness import Estimate, Flatness
from steppe.landscape.settings import LandscapeSettings
from steppe.report.finished_run import FinishedRun

TASKS = 3
DIRECTIONS, POINTS = 2, 5


def accuracy(tasks: int, level: float) -> list[list[float | None]]:
    """R[i][j]: the level, plus a point for every later task, minus four points for every task since."""
    return [
        [level + column - 4 * (row - column) if column <= row else None for column in range(tasks)]
        for row in range(tasks)
    ]


def made_result(
    method: str = "er",
    seed: int = 0,
    *,
    level: float = 80.0,
    tasks: int = TASKS,
    benchmark: str = "pmnist",
    **settings: Any,
) -> dict[str, Any]:
    """A result of this method; `settings` are the method's."""
    matrix = accuracy(tasks, level + seed)
    last = [value for value in matrix[-1] if value is not None]
    bwt = sum(last[j] - (matrix[j][j] or 0) for j in range(tasks - 1)) / max(1, tasks - 1)
    return {
        "benchmark": benchmark,
        "method": method,
        "seed": seed,
        "acc": sum(last) / tasks,
        "bwt": bwt,
        "learning_acc": 0.0,
        "forgetting": 0.0,
        "accuracy": matrix,
        "updates": 10,
        "seconds": {"train": 3.0 + seed, "evaluate": 100.0, "memory": 3.0},
        "bytes": {"replay": 2**20, "bases": 2**19},
        "full_length": True,
        "command": "steppe run made",
        "versions": {},
        "config": {"run": {}, "benchmark": {"tasks": tasks}, "method": settings, "training": {"epochs": 1}},
    }


def together(result: dict[str, Any]) -> dict[str, Any]:
    """The same for a method that learns all tasks at once."""
    size = len(result["accuracy"])
    matrix = [[None] * size] * (size - 1) + [result["accuracy"][-1]]
    return {**result, "accuracy": matrix, "bwt": None}


def write_run(path: Path, result: dict[str, Any], records: Sequence[dict[str, Any]] | None = None) -> FinishedRun:
    """Write result.json and, if there are records of the method, log.jsonl."""
    path.mkdir(parents=True)
    (path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    if records is not None:
        events = [
            {"event": "RunStarted"},
            *({"event": "TaskEnded", "task": i, "method": told} for i, told in enumerate(records)),
        ]
        (path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return FinishedRun(path, read_result(path))


def losses(after: int, task: int, height: float) -> list[list[float]]:
    """Parabolas over α, steeper along the second direction, and higher by the number of tasks since."""
    alphas = LandscapeSettings(points=POINTS, directions=DIRECTIONS, radius=1.0).alphas
    return [
        [height + after - task + steepness * alpha**2 for alpha in alphas] for steepness in range(1, DIRECTIONS + 1)
    ]


def write_landscape(
    run: FinishedRun,
    height: float = 1.0,
    pairs: Sequence[tuple[int, int]] | None = None,
    *,
    surface: bool = False,
    points: int = POINTS,
    **settings: Any,
) -> FinishedRun:
    """Write landscape.json with these pairs (after, task), or all, and return the run read again; `settings` are the
    landscape's."""
    found = Landscape(
        identities(run.result)[0],
        LandscapeSettings(points=points, directions=DIRECTIONS, radius=1.0, **settings),
        "steppe landscape RUN",
        {},
    )
    still = Estimate(0.0, None, None)
    every = [(after, task) for after in range(1, run.num_tasks + 1) for task in range(1, after + 1)]
    for after, task in every if pairs is None else pairs:
        grid = [[height + 10 * row + column for column in range(points)] for row in range(points)] if surface else None
        profiles = losses(after, task, height) if points == POINTS else [[0.0] * points] * DIRECTIONS
        found.pairs[after, task] = Pair(
            profiles, Flatness(0.0, still, still, still), NoisyLoss(0.0, 0.0, still, still), surface=grid
        )
    found.write(run.path / "landscape.json")
    return FinishedRun(run.path, run.result)


def record(tasks: int, low: float) -> list[dict[str, Any]]:
    """What a method with importances logs: none after the first task, then deciles from `low` upwards."""
    return [
        {
            "ranks": {"first.weight": {"rank": 10 * (place + 1), "of": 50}},
            "importances": {}
            if place == 0
            else {"first.weight": {"mean": 0.5, "deciles": [low + place / 10 + rank / 100 for rank in range(11)]}},
        }
        for place in range(tasks)
    ]
