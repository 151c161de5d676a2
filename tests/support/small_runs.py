"""Small runs that tests stop, kill and resume."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.run_directory import read_weights
from steppe.learning.events import Event
from steppe.registry import METHODS
from steppe.results.file_names import CHECKPOINTS, LOG, RESULT

SMALL = {
    "pmnist": ("benchmark.tasks=3", "benchmark.samples=40", "benchmark.test_samples=50"),
    "pictures": (),
}


OWN = {"gem": ("method.tasks=3",), "a-gem": ("method.tasks=3",), "icarl": ("exemplars=12",)}


CASES = [(name, method) for name in SMALL for method in METHODS if (name, method) != ("pmnist", "icarl")]


class Broken(BaseException):
    """Stands for the end of the process."""


def small(benchmark: str, method: str) -> RunConfig:
    return RunConfig.make(benchmark, method, [*SMALL[benchmark], *OWN.get(method, ())])


def timeless(value: Any) -> Any:
    """The value without everything that depends on the clock."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in ("seconds", "cpu_seconds")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def logged(out: Path) -> list[Any]:
    """A run's log, without its starts and stops."""
    lines = [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]
    return [timeless(line) for line in lines if line["event"] not in ("RunStarted", "Stopped")]


def broken_off(config: RunConfig, out: Path, moment: int) -> int:
    """Start or resume a run, and abort it after this many events; returns how many came."""
    seen = 0

    def callback(event: Event) -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            raise Broken

    with suppress(Broken):
        run(config, out, callback, resume=True, checkpoint_every=0)
    return seen


def assert_same_run(one: Path, other: Path) -> None:
    results = [json.loads((out / RESULT).read_text(encoding="utf-8")) for out in (one, other)]
    assert timeless(results[0]) == timeless(results[1])
    for task in range(len(results[0]["accuracy"])):
        if (one / CHECKPOINTS / f"task-{task + 1:03d}.safetensors").exists():
            weights = read_weights(one, task), read_weights(other, task)
            assert weights[0].keys() == weights[1].keys()
            assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert logged(one) == logged(other)
