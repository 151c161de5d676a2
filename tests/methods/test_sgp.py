"""SGP: importances against a literal transcription of their accumulation, whole updates against dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import orthonormal
from reference_baselines import compare, learn_tasks, same_bits, statistics_moves
from reference_projection_baselines import (
    FlatGPM,
    flattened,
    sgp_importances,
)
from reference_update import PROBLEMS

from steppe.projection.basis import Representation
from steppe.projection.extend_basis import extend_basis
from steppe.registry import find_method


@pytest.mark.parametrize("n", [5, 40], ids=["columns", "gram"])
def test_strengths_are_the_surrogate_singular_values(n: int) -> None:
    """With α = 0 and no old basis, λ = σ / σ_max; the reference finds σ by the SVD of M Mᵀ R."""
    r = torch.randn(9, n, dtype=torch.float64)
    old = orthonormal(9, 4, torch.Generator().manual_seed(0))
    representation = Representation()
    representation.add(r.T[None])
    growth = extend_basis(representation, old[None], 0.8, first=False)
    assert growth is not None
    new = growth.strengths[0, 4:]
    expected = torch.tensor(sgp_importances(r, old, [], new, 0.0), dtype=torch.float64)
    torch.testing.assert_close(growth.strengths[0] / growth.strengths[0].max(), expected)


@pytest.mark.parametrize("problem", ["mlp", "conv"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 20.0])
def test_three_tasks_equal_the_dense_reference(alpha: float, problem: str) -> None:
    """Weights after every update and importances after every task; some of them reach 1, some do not."""
    changes = {"basis_samples": 8, "thresholds": "0.7", "threshold_step": 0.05, "alpha": alpha, "lr": 0.05}
    methods: list[Any] = []

    def same_importances(method: Any, twin: Any) -> None:
        methods.append(method)
        for name, projector in method.memory.projectors.items():
            for basis, importance, expected in zip(
                projector.basis, projector.importance, twin.importance[name], strict=True
            ):
                found = importance[basis.square().sum(0) > 0.5]
                torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
        for name, record in method.diagnostics()["importances"].items():
            held = sorted(value for group in twin.importance[name] for value in group)
            assert record["mean"] == pytest.approx(sum(held) / len(held))
            assert [record["deciles"][0], record["deciles"][10]] == pytest.approx([held[0], held[-1]])

    compare(FlatGPM, "sgp", changes, PROBLEMS[problem], 4, same_importances)
    values = torch.cat([p.active_importance for p in methods[-1].memory.projectors.values()])
    assert bool(((values > 0) & (values < 0.99)).any())
    assert bool((values == 1).any())


def test_importances_grow_up_to_1() -> None:
    """The importance of a direction that occurs in every task reaches 1; none ever decreases."""
    learner, _ = learn_tasks("sgp", {"alpha": 1.0, "thresholds": "0.9"})
    method: Any = learner._method
    before = {name: p.importance.clone() for name, p in method.memory.projectors.items()}
    x = torch.randn(40, 1, 4, 4)
    method.memory.extend(learner.network, x, dict.fromkeys(method.memory.covered, 0.9), first=False)
    for name, p in method.memory.projectors.items():
        assert bool((p.importance[:, : before[name].shape[1]] >= before[name]).all())
        assert float(p.importance.max()) <= 1


def test_large_alpha_equals_gpm() -> None:
    one, accuracies = learn_tasks("sgp", {"alpha": 1e12, "thresholds": "0.9"})
    other, expected = learn_tasks("gpm", {"thresholds": "0.9"})
    assert accuracies == expected
    torch.testing.assert_close(flattened(one.network.trainable), flattened(other.network.trainable))


@pytest.mark.parametrize("heads", [True, False])
def test_learns_tasks_with_and_without_heads(heads: bool) -> None:
    learner, accuracies = learn_tasks("sgp", {"lr": 0.02}, heads)
    assert accuracies[-1] > 85
    assert learner._method is not None
    sizes = learner._method.memory_bytes()
    assert sizes["replay"] == 0
    assert sizes["bases"] > sizes["importances"] > 0


def test_running_statistics_move_once_per_update() -> None:
    assert statistics_moves("sgp", {}) == {1}


def test_the_same_seed_gives_the_same_bits() -> None:
    assert same_bits("sgp", {})


def test_presets_are_gpms_with_alpha() -> None:
    for benchmark in ("pmnist", "cifar100-split", "cifar100-superclass", "tiny-imagenet"):
        values = find_method("sgp").values(benchmark)
        values.pop("alpha", None)
        assert values == find_method("gpm").values(benchmark)
    assert find_method("sgp").values("cifar100-split")["alpha"] == 10
    assert find_method("sgp").values("cifar100-superclass")["alpha"] == 3
