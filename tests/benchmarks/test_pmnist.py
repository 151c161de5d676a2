"""Permuted MNIST: its tasks depend only on settings and seed; torch's global generator serves as reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steppe import PMNIST, Learner, Task, TrainingConfig
from steppe.data import mnist
from steppe.registry import find_method


def everything(task: Task) -> tuple[Tensor, Tensor]:
    """All training samples of a task, in order."""
    return next(iter(task.train.batches(len(task.train), None)))


@pytest.mark.parametrize("seed", [0, 7])
def test_tasks_are_drawn_as_in_gem(seed: int) -> None:
    """Permutations from a generator with seed 0 in every run, the first task's too; samples from the run's seed."""
    digits = mnist.load()
    torch.manual_seed(0)
    permutations = [torch.randperm(784) for _ in range(3)]
    torch.manual_seed(seed)
    chosen = [torch.randperm(60_000)[:1000] for _ in range(3)]
    tasks = PMNIST(tasks=3).stream(seed)
    assert len({task.name for task in tasks}) == len(tasks) == 3
    for task, permutation, choice in zip(tasks, permutations, chosen, strict=True):
        x, y = everything(task)
        assert torch.equal(x, digits.train_x[choice][:, permutation])
        assert torch.equal(y, digits.train_y[choice])
        assert task.head is None
        assert task.test is not None
        assert len(task.test) == 10_000
        tested, labels = next(iter(task.test.batches(50, None)))
        assert torch.equal(tested, digits.test_x[:50][:, permutation])
        assert torch.equal(labels, digits.test_y[:50])


@pytest.mark.parametrize("method", ["fs-dgpm", "er", "finetune"])
def test_learning_never_changes_the_tasks(method: str) -> None:
    """Neither existing tasks nor those created later, nor MNIST itself; creating them does not touch global state."""
    benchmark = PMNIST(tasks=2, samples=30, test_samples=20)
    found = torch.get_rng_state()
    tasks = benchmark.stream(4)
    before = [everything(task) for task in tasks]
    entry = find_method(method)
    learner = Learner(benchmark.model(4), entry.settings.from_mapping(entry.values("pmnist")), seed=4)  # type: ignore[arg-type]
    for task in tasks:
        learner.learn(task, updates_per_batch=2)
        learner.evaluate(tasks)
    assert torch.equal(torch.get_rng_state(), found)
    for (x, y), task, again in zip(before, tasks, benchmark.stream(4), strict=True):
        for other in (task, again):
            assert torch.equal(everything(other)[0], x)
            assert torch.equal(everything(other)[1], y)


def test_fewer_tasks_or_samples_are_a_prefix() -> None:
    few, many = PMNIST(tasks=1, samples=10).stream(2), PMNIST(tasks=2, samples=50).stream(2)
    assert torch.equal(everything(few[0])[0], everything(many[0])[0][:10])


def test_network_depends_only_on_the_seed() -> None:
    benchmark = PMNIST()
    found = torch.get_rng_state()
    one, two, other = benchmark.model(1), benchmark.model(1), benchmark.model(2)
    assert torch.equal(torch.get_rng_state(), found)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert sum(p.numel() for p in one.parameters()) == 89_400
    assert benchmark.training == TrainingConfig(epochs=1, batch_size=10, updates_per_batch=5)
