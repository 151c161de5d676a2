"""A-GEM: its projection, its two kinds of reference gradient, and whole updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_baselines import FlatAGEM, compare, image_tasks, learn_tasks, same_bits, statistics_moves
from reference_baselines import Normed as Model
from reference_update import PROBLEMS

from steppe import AGEM, Learner, UsageError
from steppe.methods.a_gem import remove_conflict
from steppe.registry import find_method

SMALL = {"lr": 0.1, "memory": 12, "tasks": 3}
CASES: dict[str, dict[str, Any]] = {
    "average": {**SMALL},
    "average unclipped": {**SMALL, "clip": 0},
    "average tightly clipped": {**SMALL, "clip": 0.2, "momentum": 0},
    "average of unequal memories": {**SMALL, "memory": 60, "clip": 0.2},
    "batch": {**SMALL, "reference": "batch", "reference_samples": 3},
    "batch larger than the memory": {**SMALL, "reference": "batch", "reference_samples": 50, "clip": 0.2},
}


@pytest.mark.parametrize("problem", ["mlp", "smooth", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_the_flat_reference(problem: str, case: str) -> None:
    slow = compare(FlatAGEM, "a-gem", CASES[case], PROBLEMS[problem])
    assert slow.projections > 0


def test_first_task_constrains_the_second() -> None:
    """In the second task, the first is the only past task."""
    problem = PROBLEMS["mlp"]
    torch.manual_seed(2)

    class Counting(FlatAGEM):
        in_second = 0

        def projected(self, g: torch.Tensor) -> torch.Tensor:
            before = self.projections
            out = super().projected(g)
            self.in_second += (self.task == 1) * (self.projections - before)
            return out

    assert compare(Counting, "a-gem", CASES["average"], problem, batches=6).in_second > 0


def test_projection() -> None:
    g = {"a": torch.tensor([[1.0, -2.0]]), "b": torch.tensor([0.5])}
    reference = {"a": torch.tensor([[0.0, 1.0]]), "b": torch.tensor([1.0])}
    found = remove_conflict(g, reference)  # ⟨g, r⟩ = −1.5, ⟨r, r⟩ = 2
    assert found["a"].tolist() == [[1.0, -1.25]]
    assert found["b"].tolist() == [1.25]
    assert sum(float((found[name] * reference[name]).sum()) for name in g) == pytest.approx(0)
    agreeing = {name: -part for name, part in reference.items()}
    assert remove_conflict(g, agreeing) is g
    nothing = {name: torch.zeros_like(part) for name, part in reference.items()}
    assert remove_conflict(g, nothing) is g


def test_invalid_settings_and_tasks_are_rejected() -> None:
    with pytest.raises(UsageError, match="leaves some without a sample"):
        AGEM(memory=3, tasks=4)
    with pytest.raises(UsageError, match="average, batch"):
        AGEM(reference="mean")
    learner = Learner(Model(), AGEM(memory=4, tasks=1))
    first, second = image_tasks(2)
    learner.learn(first)
    with pytest.raises(UsageError, match="tasks = 1"):
        learner.learn(second)


@pytest.mark.parametrize("reference", ["average", "batch"])
@pytest.mark.parametrize("heads", [True, False])
def test_learns(heads: bool, reference: str) -> None:
    learner, accuracies = learn_tasks("a-gem", {"memory": 24, "tasks": 3, "reference": reference}, heads)
    assert accuracies[-1] > 80
    assert learner._method is not None
    assert learner._method.memory_bytes() == {"replay": 24 * (16 + 16), "bases": 0}


@pytest.mark.parametrize("reference", ["average", "batch"])
def test_same_seed_same_bits(reference: str) -> None:
    assert same_bits("a-gem", {"memory": 12, "tasks": 3, "reference": reference})


@pytest.mark.parametrize("reference", ["average", "batch"])
def test_running_statistics_move_once_per_update(reference: str) -> None:
    assert statistics_moves("a-gem", {"memory": 24, "tasks": 3, "reference": reference}) == {1}


def test_presets_are_gem_s() -> None:
    ours, gem = find_method("a-gem"), find_method("gem")
    for benchmark, preset in ours.presets.items():
        assert preset.items() <= gem.presets[benchmark].items()
