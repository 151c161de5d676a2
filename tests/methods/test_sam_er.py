"""SAM-ER against a flat-vector transcription."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_baselines import FlatSAM, compare, learn_tasks, same_bits, statistics_moves
from reference_update import PROBLEMS

from steppe.methods.sam_er import scale_to_norm
from steppe.registry import find_method

SMALL = {"lr": 0.05, "buffer": 7}
CASES: dict[str, dict[str, Any]] = {
    "default": {**SMALL},
    "far": {**SMALL, "rho": 0.7},
    "unclipped": {**SMALL, "rho": 0.3, "clip": 0},
    "tightly clipped": {**SMALL, "rho": 0.3, "clip": 0.1, "momentum": 0},
}


@pytest.mark.parametrize("problem", ["mlp", "smooth", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_the_flat_reference(problem: str, case: str) -> None:
    compare(FlatSAM, "sam-er", CASES[case], PROBLEMS[problem])


def test_norm_of_the_perturbation() -> None:
    gradient = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([4.0])}
    v = scale_to_norm(gradient, 0.5)
    torch.testing.assert_close(v["a"], torch.tensor([[0.3, 0.0]]))
    torch.testing.assert_close(v["b"], torch.tensor([0.4]))
    still = scale_to_norm({name: torch.zeros_like(g) for name, g in gradient.items()}, 0.5)
    assert not any(bool(part.any()) for part in still.values())


@pytest.mark.parametrize("heads", [True, False])
def test_learns(heads: bool) -> None:
    learner, accuracies = learn_tasks("sam-er", {"buffer": 20}, heads)
    assert min(accuracies) > 70
    assert learner._method is not None
    assert learner._method.memory_bytes() == {"replay": 20 * (16 + 16), "bases": 0}


def test_same_seed_same_bits() -> None:
    assert same_bits("sam-er", {"buffer": 12})


def test_running_statistics_move_once_per_update() -> None:
    assert statistics_moves("sam-er", {"buffer": 12}) == {1}


def test_presets_are_er_s() -> None:
    """All of them, except for the ascent, which only fs-er has."""
    expected = {
        benchmark: {key: value for key, value in preset.items() if key != "ascent_lr"}
        for benchmark, preset in find_method("er").presets.items()
    }
    assert find_method("sam-er").presets == expected
