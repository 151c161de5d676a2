"""Validation data: training samples that a task does not use, in place of the test data, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from steppe import PMNIST, Task, UsageError
from steppe.benchmarks.base import Benchmark
from steppe.benchmarks.pmnist import PMNIST60k
from steppe.data import mnist
from steppe.data.samples import Samples


def everything(samples: Samples | None) -> tuple[Tensor, Tensor]:
    assert samples is not None
    return next(iter(samples.batches(len(samples), None)))


def rows(x: Tensor) -> set[bytes]:
    return {row.tobytes() for row in np.asarray(x)}


@pytest.mark.parametrize("seed", [0, 3])
def test_they_are_training_images_that_the_task_does_not_use(seed: int) -> None:
    benchmark = PMNIST(tasks=3)
    tested, validated = benchmark.stream(seed), benchmark.validation_stream(seed)
    digits = mnist.load()
    every, doubled = set(), rows(digits.train_x) & rows(digits.test_x)
    for one, other in zip(tested, validated, strict=True):
        for mine, its in zip(everything(one.train), everything(other.train), strict=True):
            assert torch.equal(mine, its)  # training is the same to the bit
        back = torch.argsort(other.train.view.order)  # type: ignore[attr-defined]
        x, y = everything(other.test)
        found = rows(x[:, back])
        assert len(y) == 10_000
        assert found <= rows(digits.train_x)
        assert found & rows(everything(other.train)[0][:, back]) <= doubled
        assert not found & rows(digits.test_x) - doubled
        labels = dict(zip((row.tobytes() for row in np.asarray(digits.train_x)), digits.train_y.tolist(), strict=True))
        assert [labels[row.tobytes()] for row in np.asarray(x[:100, back])] == y[:100].tolist()
        every.add(frozenset(found))
    assert len(every) == 3  # other images for each task
    assert torch.equal(everything(benchmark.validation_stream(seed)[2].test)[0], everything(validated[2].test)[0])


def test_as_many_as_are_left() -> None:
    (task,) = PMNIST(tasks=1, samples=59_990).validation_stream(0)
    assert task.test is not None
    assert len(task.test) == 10
    (task,) = PMNIST(tasks=1, test_samples=30).validation_stream(0)
    assert task.test is not None
    assert len(task.test) == 30


def test_a_benchmark_that_uses_all_reports_on_what_it_holds_out() -> None:
    benchmark = PMNIST60k(tasks=1, samples=60_000)
    (task,) = benchmark.validation_stream(0)
    (own,) = benchmark.stream(0)
    assert torch.equal(everything(task.test)[0], everything(own.val)[0])


def test_without_any_it_says_so() -> None:
    with pytest.raises(UsageError, match="permutation 1: all training images are used"):
        PMNIST(tasks=1, samples=60_000).validation_stream(0)


def test_benchmarks_without_images_use_the_tasks_own() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 2

    class Own(PMNIST):
        def stream(self, seed: int) -> list[Task]:
            return [Task((x, y), (x + 1, y), val=(x + 2, y) if seed else None, name="mine")]

        validation_stream = Benchmark.validation_stream

    assert torch.equal(everything(Own().validation_stream(1)[0].test)[0], x + 2)
    with pytest.raises(UsageError, match="mine: the benchmark has no validation data"):
        Own().validation_stream(0)
