"""GPM: growing bases against full SVDs, whole updates against a dense flat reference, and what must not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import no_hooks, orthonormal, widest_angle
from reference_baselines import Normed, compare, learn_tasks, same_bits, started_on, statistics_moves
from reference_projection_baselines import (
    FlatGPM,
    flattened,
    gpm_basis,
)
from reference_update import PROBLEMS, drawn
from torch import Tensor, nn

from steppe import GPM, SGP, Batch, Learner, ModelError, Task, UsageError
from steppe.projection.basis import Representation
from steppe.projection.extend_basis import extend_basis


def feed(r: Tensor) -> Representation:
    """A representation of R, (groups, in, n), added in two chunks."""
    representation = Representation()
    representation.add(r.mT[:, :3])
    representation.add(r.mT[:, 3:])
    return representation


def spread(inputs: int, n: int, rate: float, seed: int) -> Tensor:
    """R with singular values 1, rate, rate², …, (in, n)."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(inputs, n)
    values = rate ** torch.arange(rank, dtype=torch.float64)
    return orthonormal(inputs, rank, generator) @ torch.diag(values) @ orthonormal(n, rank, generator).T


def directions_of(basis: Tensor) -> Tensor:
    """A group's directions without padding."""
    return basis[:, basis.square().sum(0) > 0.5]


@pytest.mark.parametrize("n", [7, 40], ids=["columns", "gram"])
@pytest.mark.parametrize("threshold", [0.3, 0.75, 0.9, 0.99])
def test_extended_basis_equals_the_full_svd(n: int, threshold: float) -> None:
    first = extend_basis(feed(spread(12, n, 0.7, 1)[None]), None, threshold, first=True)
    assert first is not None
    expected, values = gpm_basis(spread(12, n, 0.7, 1), torch.zeros(12, 0, dtype=torch.float64), threshold, True)
    assert widest_angle(first.basis[0], expected) < 1e-10
    torch.testing.assert_close(first.strengths[0], values)
    old = first.basis
    for seed in (2, 3):
        r = spread(12, n, 0.7, seed)
        second = extend_basis(feed(r[None]), old, threshold, first=False)
        assert second is not None
        new, values = gpm_basis(r, old[0], threshold, False)
        rank = old.shape[-1]
        assert torch.equal(second.basis[..., :rank], old)
        assert widest_angle(second.basis[0, :, rank:], new) < 1e-9
        torch.testing.assert_close(second.strengths[0, rank:], values)
        identity = torch.eye(second.basis.shape[-1], dtype=torch.float64)
        torch.testing.assert_close(second.basis[0].T @ second.basis[0], identity, rtol=0, atol=1e-12)
        old = second.basis


def test_crossing_vector_is_dropped_in_the_first_task_only() -> None:
    """Singular values 3, 2, 1: energies 9, 4, 1 of 14; the second vector crosses a share of 0.8."""
    r = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))[None]
    first = extend_basis(feed(r), None, 0.8, first=True)
    later = extend_basis(feed(r), None, 0.8, first=False)
    assert first is not None
    assert later is not None
    assert (first.basis.shape[-1], later.basis.shape[-1]) == (1, 2)
    again = extend_basis(feed(r), later.basis, 0.8, first=False)  # the basis already holds 13/14: nothing to add
    assert again is not None
    assert torch.equal(again.basis, later.basis)


@given(st.integers(1, 3), st.integers(2, 9), st.sampled_from([0.5, 0.9, 0.999, 1.0]), st.integers(0, 99))
def test_bases_stay_orthonormal_and_within_the_dimension(groups: int, n: int, threshold: float, seed: int) -> None:
    """In single precision, as stored, over many tasks, with groups of different ranks."""
    generator = torch.Generator().manual_seed(seed)
    old: Tensor | None = None
    for task in range(6):
        r = torch.randn(groups, 5, n, generator=generator, dtype=torch.float64)
        r[0, :, 1:] = r[0, :, :1]  # the first group sees only one direction
        growth = extend_basis(feed(r), old, threshold, first=task == 0)
        assert growth is not None
        basis = growth.basis.float()
        assert basis.shape[-1] <= 5
        for group in range(groups):
            directions = directions_of(basis[group])
            identity = torch.eye(directions.shape[1])
            torch.testing.assert_close(directions.T @ directions, identity, rtol=0, atol=1e-5)
            if old is not None:
                before = directions_of(old[group])
                assert torch.equal(directions[:, : before.shape[1]], before)
        old = basis


def test_each_group_is_extended_independently() -> None:
    """Each group equals its own extension, whatever the others need, and padding never takes a column permanently."""
    olds: list[Tensor] = [torch.zeros(6, 0, dtype=torch.float64)] * 2
    together: Tensor | None = None
    for task, (a, b) in enumerate([(1.0, 0.2), (0.2, 1.0), (0.9, 0.9)]):
        r = torch.stack([spread(6, 20, 0.5 + 0.4 * a, task), spread(6, 20, 0.1 + 0.4 * b, 9 + task)])
        growth = extend_basis(feed(r), together, 0.95, first=task == 0)
        assert growth is not None
        for group in range(2):
            new, _ = gpm_basis(r[group], olds[group], 0.95, task == 0)
            found = directions_of(growth.basis[group])
            rank = olds[group].shape[1]
            assert torch.equal(found[:, :rank], olds[group])
            assert widest_angle(found[:, rank:], new) < 1e-8
            olds[group] = found
        together = growth.basis
        assert together.shape[-1] == max(old.shape[1] for old in olds)


@pytest.mark.parametrize("n", [2, 40], ids=["columns", "gram"])
def test_coarse_bases_are_extended_in_double_precision(n: int) -> None:
    """In the first task and in later ones."""
    old: Tensor | None = None
    for seed in range(2):
        representation = Representation(0.9)
        representation.add(spread(12, n, 0.7, seed).T[None].float())
        growth = extend_basis(representation, old, 0.9, first=seed == 0)
        assert growth is not None
        assert {part.dtype for part in growth} == {torch.float64}
        old = growth.basis.float()


def test_empty_and_zero_representations() -> None:
    assert extend_basis(Representation(), None, 0.9, first=True) is None
    zero = extend_basis(feed(torch.zeros(1, 4, 6, dtype=torch.float64)), None, 0.9, first=False)
    assert zero is not None
    assert zero.basis.shape == (1, 4, 0)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"thresholds": "0.6", "threshold_step": 0.05},
    "clipped": {"thresholds": "0.6", "clip": 0.2, "lr": 0.05},
    "per layer": {"thresholds": "0.5,0.7,0.9", "momentum": 0.0},
}


@pytest.mark.parametrize("problem", ["mlp", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_three_tasks_equal_the_dense_reference(case: str, problem: str) -> None:

    def same_ranks(method: Any, twin: Any) -> None:
        assert method.memory.projectors
        for name, projector in method.memory.projectors.items():
            ranks = [vectors.shape[1] for vectors in twin.vectors[name]]
            assert [directions_of(basis).shape[1] for basis in projector.basis] == ranks, name
        assert no_hooks(method.network.model)

    compare(FlatGPM, "gpm", {"basis_samples": 8, **CASES[case]}, PROBLEMS[problem], 4, same_ranks)


def test_outputs_on_the_spanned_samples_do_not_change() -> None:
    """With every direction in the basis, the old task's outputs stay the same while the new one is learned."""
    model = nn.Sequential(nn.Linear(30, 20, bias=False), nn.ReLU(), nn.Linear(20, 4, bias=False)).double()
    learner = Learner(model, GPM(thresholds="1", basis_samples=6, lr=0.1))
    x, y = torch.randn(6, 30, dtype=torch.float64), torch.randint(0, 4, (6,))
    learner.learn(Task((x, y)), epochs=3)
    learner.learn(Task((x, y)), epochs=3)  # the first task drops the crossing vector; the second adds it
    before, weights = model(x), flattened(learner.network.trainable)
    learner.learn(Task((torch.randn(40, 30, dtype=torch.float64), torch.randint(0, 4, (40,)))), epochs=3)
    assert float((flattened(learner.network.trainable) - weights).norm()) > 0.1
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("frozen", [True, False])
def test_norm_layers_are_frozen_from_the_second_task(frozen: bool) -> None:
    torch.manual_seed(0)
    learner = Learner(Normed(), GPM(freeze_norms=frozen))
    norm: Any = learner.model.norm
    start = norm.weight.detach().clone()
    x = torch.randn(12, 1, 4, 4)
    learner.learn(Task((x, torch.arange(12) % 2), head=range(0, 2)))
    after = norm.weight.detach().clone()
    statistics = norm.running_mean.clone()
    assert not torch.equal(after, start)
    learner.learn(Task((x, torch.arange(12) % 2 + 2), head=range(2, 4)))
    assert torch.equal(norm.weight, after) == frozen
    assert not torch.equal(norm.running_mean, statistics)


@pytest.mark.parametrize("heads", [True, False])
def test_learns_tasks_with_and_without_heads(heads: bool) -> None:
    learner, accuracies = learn_tasks("gpm", {"thresholds": 0.9, "lr": 0.02}, heads)
    assert accuracies[-1] > 85
    method: Any = learner._method
    assert ("second.weight" in method.memory.projectors) == (not heads)  # with several heads, the head is not covered
    sizes = method.memory_bytes()
    assert sizes["replay"] == 0
    assert sizes["bases"] == sum(p.basis.nbytes for p in method.memory.projectors.values()) > 0


def test_running_statistics_move_once_per_update() -> None:
    assert statistics_moves("gpm", {}) == {1}


def test_the_same_seed_gives_the_same_bits() -> None:
    assert same_bits("gpm", {})


def test_small_task_gives_a_remark() -> None:
    learner = Learner(nn.Linear(3, 2), GPM(basis_samples=50))
    found = learner.learn(Task((torch.randn(20, 3), torch.randint(0, 2, (20,)))))
    assert found.remarks == ["basis_samples = 50 exceeds the task's 20 samples: all were used."]


@pytest.mark.parametrize("text", ["", "a", "0.9,", "0.9;0.8", "0", "1.2", "nan", "-0.5,0.9"])
def test_invalid_thresholds_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="thresholds"):
        GPM(thresholds=text)


def test_thresholds_must_fit_the_layers() -> None:
    learner = Learner(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), GPM(thresholds="0.9,0.9,0.9"))
    task = Task((torch.randn(20, 3), torch.randint(0, 2, (20,))))
    with pytest.raises(UsageError, match=r"3 numbers, but the model has 2 projected layers \(0.weight, 1.weight\)"):
        learner.validate(task)
    assert GPM(thresholds=0.9).thresholds == "0.9"  # type: ignore[arg-type]


def test_model_without_covered_layers_is_rejected() -> None:
    learner = Learner(nn.Sequential(nn.BatchNorm1d(3)), GPM())
    with pytest.raises(ModelError, match="no layer that a gradient memory can cover"):
        learner.validate(Task((torch.randn(20, 3), torch.randint(0, 3, (20,)))))


def test_bases_use_only_samples_of_the_task() -> None:
    """The reservoir is empty at the start of each task, and is dropped at its end."""
    setup = PROBLEMS["mlp"]
    _, network, method = started_on(setup, "gpm", {"basis_samples": 4})
    for task in range(2):
        network.heads.add(None, 4)
        method.begin_task()
        batch = drawn(setup, task, 9)
        method.observe(batch)
        method.after_batch(batch)
        kept: Batch = method._samples.sample(4)
        assert kept.task.tolist() == [task] * 4
        method.end_task()
        assert len(method._samples) == 0


@pytest.mark.parametrize("method", [GPM, SGP])
def test_empty_basis_gives_a_remark(method: Any) -> None:
    """Inputs far from 0 have one dominant direction, and the first task drops the one that crosses the threshold."""
    x, y = torch.randn(40, 6) + 30, torch.arange(40) % 2
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    learner = Learner(model, method(thresholds="0.9,1", lr=1e-4))
    remarks = learner.learn(Task((x, y))).remarks
    assert [text for text in remarks if "is empty" in text] == [text for text in remarks if "'0.weight'" in text] != []
    assert "threshold's share of its inputs, 0.9," in "".join(remarks)
    assert not any(
        "is empty" in text for text in learner.learn(Task((x, y))).remarks
    )  # later tasks include the crossing direction


def test_layer_without_inputs_needs_no_basis() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Hardtanh(-9.0, 0.0), nn.Hardtanh(0.0, 9.0), nn.Linear(8, 2))
    remarks = Learner(model, GPM(thresholds=0.9)).learn(Task((torch.randn(40, 6), torch.arange(40) % 2))).remarks
    assert not any("'3.weight'" in text for text in remarks)
