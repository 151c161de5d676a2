"""DER++: its loss against a literal transcription, and the reservoir that stores logits with samples."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference import ListReservoir
from reference_baselines import FlatDER, compare, learn_tasks, same_bits, started, statistics_moves
from reference_update import PROBLEMS, drawn

from steppe.methods.parts.reservoir import Reservoir
from steppe.registry import find_method
from steppe.tensors.batch import Batch

SMALL = {"lr": 0.05, "buffer": 7}
CASES: dict[str, dict[str, Any]] = {
    "both": {**SMALL, "alpha": 0.7, "beta": 0.4},
    "unclipped": {**SMALL, "alpha": 1.0, "beta": 1.0, "clip": 0},
    "tightly clipped": {**SMALL, "alpha": 1.0, "beta": 0.5, "clip": 0.1, "momentum": 0},
    "der": {**SMALL, "alpha": 1.5, "beta": 0},
    "labels alone": {**SMALL, "alpha": 0, "beta": 1.0},
    "buffer smaller than a batch": {**SMALL, "buffer": 2, "alpha": 0.7, "beta": 0.4},
}


@pytest.mark.parametrize("problem", ["mlp", "smooth", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_the_flat_reference(problem: str, case: str) -> None:
    compare(FlatDER, "der++", CASES[case], PROBLEMS[problem])


def test_stored_logits_are_those_of_the_last_update_on_the_sample() -> None:
    """The raw output, all columns, of the last update before the sample was stored; later updates do not change it."""
    problem = PROBLEMS["conv"]
    model = problem.build()
    _, network, method = started("der++", {"buffer": 5, "lr": 0.2}, model)
    network.heads.add(problem.heads[0], 6)
    method.begin_task()
    batch = drawn(problem, 0, 5)
    method.observe(batch)
    with torch.no_grad():
        expected = model(batch.x)
    method.observe(batch)
    method.after_batch(batch)
    noted = method.replay.sample_with_extras(5)
    assert noted is not None
    samples, logits = noted
    place = [int((batch.x == x).flatten(1).all(1).nonzero()) for x in samples.x]
    torch.testing.assert_close(logits, expected[place])
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("capacity", [1, 5, 40])
def test_extras_stay_with_their_samples(capacity: int) -> None:
    fast = Reservoir(capacity, random.Random(1), random.Random(2))
    slow = ListReservoir(capacity, random.Random(1), random.Random(2))
    assert fast.sample_with_extras(3) is None
    number = 0
    for size in (3, 1, 7, 4, 9, 2):
        y = torch.arange(number, number + size)
        number += size
        fast.add(Batch(y.float().unsqueeze(1), y, torch.zeros_like(y)), extras=torch.stack((y, 10 * y), 1))
        for value in y.tolist():
            slow.push(value)
        drawn_now = fast.sample_with_extras(6)
        assert drawn_now is not None
        batch, notes = drawn_now
        assert batch.y.tolist() == slow.draw(6)
        assert notes.tolist() == [[value, 10 * value] for value in batch.y.tolist()]
    assert fast.extras_bytes() == capacity * 16
    assert fast.memory_bytes() == capacity * (4 + 8 + 8)


@pytest.mark.parametrize("heads", [True, False])
def test_learns(heads: bool) -> None:
    learner, accuracies = learn_tasks("der++", {"buffer": 20}, heads)
    assert min(accuracies) > 70
    assert learner._method is not None
    assert learner._method.memory_bytes() == {"replay": 20 * (16 + 16), "logits": 20 * 6 * 4, "bases": 0}


def test_same_seed_same_bits() -> None:
    assert same_bits("der++", {"buffer": 12})


def test_running_statistics_move_once_per_update() -> None:
    assert statistics_moves("der++", {"buffer": 12}) == {1}


def test_presets() -> None:
    values = find_method("der++").values("pmnist")
    assert (values["alpha"], values["beta"], values["buffer"]) == (1.0, 1.0, 200)
    assert find_method("der++").values("cifar100-split")["lr"] == find_method("er").values("cifar100-split")["lr"]
