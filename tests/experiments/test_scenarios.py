"""Benchmarks in the task-, domain- and class-incremental scenario, from the command line to the landscape."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from own_images import synthetic
from small_runs import OWN, assert_same_run, broken_off

import steppe
from steppe import CIFAR100Split, Learner, SplitMNIST, UsageError
from steppe.benchmarks import image_benchmark as image_tasks
from steppe.cli.main import main
from steppe.data import cifar100
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.experiments.run_directory import read_weights
from steppe.landscape.files import read_landscape
from steppe.learning import loop as training
from steppe.learning.events import Event
from steppe.registry import METHODS

SMALL = ("scenario=class", "benchmark.tasks=3", "benchmark.samples=40")


def small(method: str) -> RunConfig:
    return RunConfig.make("split-mnist", method, [*SMALL, *OWN.get(method, ())])


@pytest.mark.parametrize("method", [name for name in METHODS if name != "icarl"])
def test_a_class_incremental_run_resumes_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_REPORT_EVERY", 0.0)
    events: list[Event] = []
    result = run(small(method), tmp_path / "whole", events.append)
    broken_off(small(method), tmp_path / "broken", random.Random(method).randint(3, len(events) - 1))
    run(small(method), tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    assert not result.is_canonical
    assert result.forward_transfer is None
    assert result.remarks[0].startswith("class-incremental: each sample is predicted among all classes seen so far")
    last = 2 if METHODS[method].settings.schedule == "joint" else 0  # type: ignore[attr-defined]
    assert [len(read_weights(tmp_path / "whole", task)["head.weight"]) for task in range(last, 3)] == [2, 4, 6][last:]


def test_all_classes_so_far_compete() -> None:
    """Against a plain loop: trained on the logits of the classes so far, tested among them."""
    benchmark = SplitMNIST(scenario="class", tasks=3, samples=100)
    tasks = benchmark.stream(0)
    learner = Learner(benchmark.model(0), steppe.ER(), head=benchmark.growing_head, grow=True)
    for number, task in enumerate(tasks):
        assert task.head is None
        learner.learn(task)
        model = learner.model
        for earlier in tasks[: number + 1]:
            x, y = next(iter(earlier.test.batches(100_000, None)))  # type: ignore[union-attr]
            with torch.no_grad():
                logits = model(x / 255)
            assert logits.shape[1] == 2 * number + 2
            right = 100 * float((logits.argmax(1) == y).double().mean())
            assert learner.evaluate(earlier) == [pytest.approx(right, abs=0.11)]  # one sample may round otherwise


@pytest.mark.parametrize("scenario", image_tasks.SCENARIOS)
@pytest.mark.parametrize("name", ["split-mnist", "cifar100-split"])
def test_labels_and_heads(scenario: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar100, "load", lambda: synthetic(100, each=60))
    each, kind = (2, SplitMNIST) if name == "split-mnist" else (10, CIFAR100Split)
    benchmark = kind(scenario=scenario, tasks=3)
    usual = kind(tasks=3).stream(1)
    for number, task in enumerate(benchmark.stream(1)):
        own = range(each * number, each * number + each)
        outputs = range(each) if scenario == "domain" else own
        assert task.head == (own if scenario == "task" else None)
        assert sorted(set(task.train.y.tolist())) == list(outputs)  # type: ignore[attr-defined]
        shift = own.start if scenario == "domain" else 0
        for part in ("train", "test"):
            now, before = getattr(task, part), getattr(usual[number], part)
            assert torch.equal(now.x, before.x)
            assert torch.equal(now.y + shift, before.y)
    every = 10 if name == "split-mnist" else 100
    assert len(benchmark.network().state_dict()["head.weight"]) == (every if scenario == "task" else each)
    assert benchmark.growing_head == ("head" if scenario == "class" else None)
    assert (benchmark.remarks() == []) == (scenario == "task")


def test_hidden_layers_start_alike_in_all_scenarios() -> None:
    models = [SplitMNIST(scenario=scenario).model(3).state_dict() for scenario in image_tasks.SCENARIOS]
    for name in ("first.weight", "second.weight"):
        assert all(torch.equal(model[name], models[0][name]) for model in models)


def test_icarl_says_before_any_work_that_it_needs_heads(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give the tasks heads"):
        run(small("icarl"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_landscape_of_a_head_that_grew(tmp_path: Path) -> None:
    out = tmp_path / "run"
    sets = [word for each in SMALL for word in ("--set", each)]
    assert main(["run", "split-mnist", "er", *sets, "--out", str(out)]) == 0
    assert main(["landscape", str(out), "--directions", "2", "--samples", "20"]) == 0
    landscape = read_landscape(out / "landscape.json")
    assert sorted(landscape.pairs) == [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]
    assert sorted(landscape.bounds) == [2, 3]
    for after, task in landscape.pairs:  # at w itself: the loss of the task at those weights
        middle = landscape.pairs[after, task].losses[0]
        assert middle[len(middle) // 2] < 3.0
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert "scenario=class" in result["command"]
    assert "class-incremental" in (out / "report.html").read_text(encoding="utf-8")


def test_the_list_names_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out.count("class-incremental") == 2
    assert main(["list", "split-mnist"]) == 0
    assert "one of task, domain, class" in capsys.readouterr().out
