"""Run directories like those of `steppe run`, created without training, for tests of the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from steppe.experiments.run_directory import read_result
from steppe.landscape.bound import NoisyLoss
from steppe.landscape.files import Landscape, Pair, identities
from steppe.landscape.flatness import Estimate, Flatness
from steppe.landscape.settings import LandscapeSettings

HOSTILE = "<script>alert(1)</script>"
QUOTES = "a\"b'c</script><img src=x onerror=alert(2)>&amp;"


def write_run(
    path: Path,
    method: str = "er",
    seed: int = 0,
    *,
    benchmark: str = "pmnist",
    settings: dict[str, Any] | None = None,
    tasks: tuple[str, ...] = ("first", "second", "third"),
    lift: float = 0.0,
    changes: str = "",
    **given: Any,
) -> dict[str, Any]:
    """A finished run whose accuracies follow from the seed and `lift`; returns its result."""
    size = len(tasks)
    accuracy = [
        [80 + lift + math.sin(7 * seed + 3 * j) - 2.0 * (i - j) if j <= i else None for j in range(size)]
        for i in range(size)
    ]
    last = accuracy[-1]
    spent = {"train": 2.0 + seed, "evaluate": 0.5, "memory": 0.25}
    result = {
        "benchmark": benchmark,
        "method": method,
        "seed": seed,
        "acc": sum(last) / size,
        "bwt": sum(last[j] - accuracy[j][j] for j in range(size - 1)) / max(size - 1, 1),
        "learning_acc": sum(accuracy[j][j] for j in range(size)) / size,
        "forgetting": 2.0,
        "accuracy": accuracy,
        "updates": 10,
        "seconds": {kind: value * size for kind, value in spent.items()},
        "bytes": {"replay": 1000, "bases": 300},
        "per_task": [
            {"seconds": spent, "bytes": {"replay": 1000, "bases": 100 * (i + 1)}, "updates": 5} for i in range(size)
        ],
        "full_length": True,
        "remarks": [],
        "command": f"steppe run {benchmark} {method} --seed {seed}{changes}",
        "versions": {"steppe": "0.1.0", "torch": "2.13.0"},
        "config": {
            "run": {"benchmark": benchmark, "method": method, "seed": seed},
            "benchmark": {"tasks": size},
            "method": {"lr": 0.01, **(settings or {})},
            "training": {"epochs": 1},
        },
        **given,
    }
    path.mkdir(parents=True)
    (path / "config.toml").write_text("", encoding="utf-8")
    (path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    events = [
        {"event": "TaskEnded", "task": i, "name": name, "remarks": [], "method": _told(i, seed)}
        for i, name in enumerate(tasks)
    ]
    (path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return result


def _told(place: int, seed: int) -> dict[str, Any]:
    deciles = [(number + seed) / 20 for number in range(11)]
    return {
        "ranks": {"first.weight": {"rank": 10 * (place + 1) + seed, "of": 100}},
        "importances": {"first.weight": {"mean": 0.5, "deciles": deciles}} if place else {},
    }


def write_landscape(
    path: Path, tasks: int = 3, sharpness: float = 1.0, measured: dict[str, Any] | None = None, **given: Any
) -> None:
    """landscape.json in a run directory: parabolas that grow steeper with every task; `measured` are settings, `given`
    replaces parts of it."""
    settings = LandscapeSettings(**{"points": 21, "directions": 2, "samples": 10, "radius": 1.0, **(measured or {})})
    run = identities(read_result(path))[0]
    found = Landscape(run, settings, "steppe landscape RUN", {})
    for after, task in [(column, row) for column in range(1, tasks + 1) for row in range(1, column + 1)]:
        flat = Flatness(
            0.3, Estimate(sharpness * after, 0.1, 0.07), Estimate(0.25, 0.01, 0.007), Estimate(1.5, 0.2, 0.14)
        )
        losses = [
            [0.3 + (number + 1) / 2 * sharpness * after * alpha**2 for alpha in settings.alphas]
            for number in range(settings.directions)
        ]
        noisy = NoisyLoss(0.0, 0.0, flat.sharpness, flat.sharpness)
        found.pairs[after, task] = Pair(losses, flat, noisy, None if task > 1 else 12.5)
    file = path / "landscape.json"
    found.write(file)
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **given}), encoding="utf-8")
