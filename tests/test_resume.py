"""A run that broke off anywhere, resumed, gives what it would have given: results, weights and log, bit for bit."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pictures  # noqa: F401 - registers its benchmark
import pytest
import torch

from steppe import training
from steppe.config import RunConfig
from steppe.errors import UsageError
from steppe.events import Event
from steppe.experiment import run
from steppe.registry import METHODS
from steppe.runs import CHECKPOINTS, LOG, RESULT, task_weights

SMALL = {
    "pmnist": ("benchmark.tasks=3", "benchmark.samples=40", "benchmark.test_samples=50"),
    "pictures": (),
}
OWN = {"gem": ("method.tasks=3",), "a-gem": ("method.tasks=3",), "icarl": ("exemplars=12",)}
CASES = [(name, method) for name in SMALL for method in METHODS if (name, method) != ("pmnist", "icarl")]


class Broken(BaseException):
    """The end of a process, as far as the run can tell."""


def small(benchmark: str, method: str) -> RunConfig:
    return RunConfig.make(benchmark, method, [*SMALL[benchmark], *OWN.get(method, ())])


def timeless(value: Any) -> Any:
    """The same without whatever depends on the clock."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def logged(out: Path) -> list[Any]:
    """What a run logged, without its starts and stops."""
    lines = [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]
    return [timeless(line) for line in lines if line["event"] not in ("RunStarted", "Stopped")]


def broken_off(config: RunConfig, out: Path, moment: int) -> int:
    """Go on with a run until so many events have come, then break off; returns how many came."""
    seen = 0

    def watch(event: Event) -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            raise Broken

    with suppress(Broken):
        run(config, out, watch, resume=True, checkpoint_every=0)
    return seen


def assert_same_run(one: Path, other: Path) -> None:
    results = [json.loads((out / RESULT).read_text(encoding="utf-8")) for out in (one, other)]
    assert timeless(results[0]) == timeless(results[1])
    for task in range(len(results[0]["accuracy"])):
        if (one / CHECKPOINTS / f"task-{task + 1:03d}.safetensors").exists():
            weights = task_weights(one, task), task_weights(other, task)
            assert weights[0].keys() == weights[1].keys()
            assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert logged(one) == logged(other)


@pytest.fixture(autouse=True)
def _every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chance to break off after every batch."""
    monkeypatch.setattr(training, "_REPORT_EVERY", 0.0)


@pytest.mark.parametrize(("benchmark", "method"), CASES)
def test_resumed_is_the_same(benchmark: str, method: str, tmp_path: Path) -> None:
    config = small(benchmark, method)
    run(config, tmp_path / "whole")
    moments = random.Random(f"{benchmark} {method}")
    total = broken_off(config, tmp_path / "counted", -1)
    for _ in range(3):
        broken_off(config, tmp_path / "broken", moments.randint(1, max(2, total // 2)))
    run(config, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_broken_off_at_every_moment_there_is(tmp_path: Path) -> None:
    config = RunConfig.make("pictures", "fs-dgpm", ["benchmark.tasks=2", "benchmark.samples=8", "training.epochs=3"])
    run(config, tmp_path / "whole")
    moment = 1
    while broken_off(config, tmp_path / f"broken {moment}", moment) == moment:
        run(config, tmp_path / f"broken {moment}", resume=True)
        assert_same_run(tmp_path / "whole", tmp_path / f"broken {moment}")
        moment += 1
    assert moment > 10


def test_what_is_finished_is_left_alone(tmp_path: Path) -> None:
    config = small("pictures", "er")
    run(config, tmp_path / "out")
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    (tmp_path / "out" / "report.md").unlink()  # as if killed just before it was written
    run(config, tmp_path / "out", resume=True)
    assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == before


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    broken_off(small("pictures", "er"), tmp_path / "out", 9)
    with pytest.raises(UsageError, match="other settings"):
        run(small("pictures", "finetune"), tmp_path / "out", resume=True)
