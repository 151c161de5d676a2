"""EWC against the literal sum over past tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_baselines import FlatEWC, compare, learn_tasks, same_bits, started, statistics_moves
from reference_update import PROBLEMS, drawn

from steppe.methods.ewc import Penalty

CASES: dict[str, dict[str, Any]] = {
    "clipped": {"lr": 0.05, "strength": 30.0, "samples": 4},
    "unclipped": {"lr": 0.05, "strength": 10.0, "samples": 7, "clip": 0},
    "tightly clipped": {"lr": 0.05, "strength": 100.0, "samples": 3, "clip": 0.1},
    "more samples than there are": {"lr": 0.05, "strength": 10.0, "samples": 100, "momentum": 0},
    "no penalty": {"strength": 0},
}


@pytest.mark.parametrize("problem", ["mlp", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_the_flat_reference(problem: str, case: str) -> None:
    compare(FlatEWC, "ewc", CASES[case], PROBLEMS[problem])


def test_importance_is_the_squared_batch_gradient() -> None:
    """Of the mean loss on the task's first samples, at its final weights; by finite differences."""
    problem = PROBLEMS["smooth"]
    model = problem.build()
    _, network, method = started("ewc", {"samples": 4}, model)
    network.heads.add(None, 4)
    method.begin_task()
    batches = [drawn(problem, 0, 3) for _ in range(3)]
    for batch in batches:
        method.observe(batch)
        method.after_batch(batch)
    method.end_task()
    first = batches[0].joined(batches[1])[:4]
    weight = network.trainable["0.weight"]
    for place in [(0, 0), (5, 3), (11, 5)]:
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[place] += step
                values.append(float(network.loss(first)))
                weight[place] -= step
        slope = (values[0] - values[1]) / 2e-6
        assert float(method.penalty.importance["0.weight"][place]) == pytest.approx(slope**2, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("tasks", [1, 2, 7])
def test_merged_penalty_equals_the_sum_over_tasks(tasks: int) -> None:
    shapes = {"a": (3, 2), "b": (4,)}
    weights = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    penalty = Penalty(weights)
    terms = []
    for _ in range(tasks):
        importance = {name: torch.rand(shape, dtype=torch.float64) ** 4 for name, shape in shapes.items()}
        importance["b"][1] = 0  # a weight that no task uses
        reached = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
        penalty.add(importance, reached)
        terms.append((importance, reached))
        value, slope = penalty(weights)
    again = Penalty(weights)
    again(weights)
    again.load_state_dict(penalty.state_dict())
    torch.testing.assert_close(again(weights)[0], value)
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    literal = sum((f[name] * (leaves[name] - r[name]) ** 2).sum() for f, r in terms for name in shapes)
    assert isinstance(literal, torch.Tensor)
    literal.backward()
    assert float(value.detach()) == pytest.approx(float(literal.detach()), rel=1e-12)
    for name, leaf in leaves.items():
        torch.testing.assert_close(slope[name], leaf.grad, rtol=1e-12, atol=1e-12)


def test_evaluating_the_penalty_does_not_change_it() -> None:
    """It is the same whether or not it is evaluated between two tasks."""
    weights = {"a": torch.zeros(3)}
    asked, silent = Penalty(weights), Penalty(weights)
    for reached in (1.0, -2.0):
        for penalty in (asked, silent):
            penalty.add({"a": torch.ones(3)}, {"a": torch.full((3,), reached)})
        value, _ = asked(weights)
    assert float(value) == float(silent(weights)[0]) == 15


def test_penalty_is_never_negative_in_single_precision() -> None:
    """Near the center, where θ²ΣF − 2θΣFθ* + ΣFθ*² would cancel to noise."""
    weights = {"a": torch.full((1000,), 3.0)}
    penalty = Penalty(weights)
    for _ in range(5):
        penalty.add({"a": torch.rand(1000)}, weights)
    value, slope = penalty(weights)
    assert float(value) == 0
    assert not slope["a"].any()


def test_memory_does_not_grow_with_the_tasks() -> None:
    learner, accuracies = learn_tasks("ewc", {"samples": 8, "strength": 10.0})
    assert min(accuracies) > 60
    size = 4 * sum(p.numel() for p in learner.model.parameters())
    assert learner._method is not None
    assert learner._method.memory_bytes() == {"replay": 0, "bases": 0, "importances": size, "weights": size}


def test_single_head() -> None:
    assert learn_tasks("ewc", {"samples": 8}, heads=False)[1][-1] > 80


def test_same_seed_same_bits() -> None:
    assert same_bits("ewc", {"samples": 5})


def test_running_statistics_move_once_per_update() -> None:
    assert statistics_moves("ewc", {"samples": 5}) == {1}
