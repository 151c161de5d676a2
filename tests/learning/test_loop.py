"""The training loop of a task: updates per batch, what is stored and when, and which events are reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from own_models import bright, mlp
from torch import Tensor

from steppe import Batch, Learner, Method, MethodConfig, Task
from steppe.learning.events import EpochEnded

X, Y = bright(8)(23, 0)


class Diary(Method):
    """Records the calls it gets."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, list[int]]] = []
        self.tasks: list[int] = []

    def begin_task(self) -> None:
        self.entries.append(("begin", []))

    def observe(self, batch: Batch) -> Tensor:
        self.entries.append(("observe", _numbers(batch)))
        self.tasks += batch.task.tolist()
        return torch.tensor(float(len(self.entries)))

    def after_batch(self, batch: Batch) -> None:
        self.entries.append(("remember", _numbers(batch)))

    def end_task(self) -> list[str]:
        self.entries.append(("end", []))
        return ["done"]


def _numbers(batch: Batch) -> list[int]:
    """The indices in X of a batch's samples."""
    return [int((x == X).all(1).nonzero()[0]) for x in batch.x]


@dataclass(frozen=True)
class Writing(MethodConfig):
    def start(self, network: Any, covered: Mapping[str, Any], streams: Any) -> Method:
        return Diary()


@pytest.mark.parametrize(("epochs", "updates_per_batch"), [(1, 1), (1, 5), (3, 2)])
def test_updates_per_batch_and_after_batch(epochs: int, updates_per_batch: int) -> None:
    """Each batch is observed `updates_per_batch` times, then passed to `after_batch` once, in the first epoch only; the
    order differs between epochs."""
    told: list[Any] = []
    learner = Learner(mlp(), Writing())
    result = learner.learn(
        Task((X, Y), name="digits"), epochs=epochs, updates_per_batch=updates_per_batch, callback=told.append
    )
    diary = learner.validate(Task((X, Y)))
    assert isinstance(diary, Diary)
    assert diary.entries[0][0] == "begin"
    assert diary.entries[-1][0] == "end"
    middle, orders = iter(diary.entries[1:-1]), []
    for epoch in range(epochs):
        seen: list[int] = []
        for size in (10, 10, 3):
            batches = [next(middle) for _ in range(updates_per_batch)]
            assert all(kind == "observe" and numbers == batches[0][1] for kind, numbers in batches)
            assert len(batches[0][1]) == size
            if epoch == 0:
                assert next(middle) == ("remember", batches[0][1])
            seen += batches[0][1]
        assert sorted(seen) == list(range(23))
        orders.append(seen)
    assert next(middle, None) is None
    assert len({tuple(order) for order in orders}) == epochs
    assert result.updates == 3 * epochs * updates_per_batch
    assert result.remarks == ["done"]
    ends = [event for event in told if isinstance(event, EpochEnded)]
    assert [(event.task, event.name, event.epoch) for event in ends] == [(0, "digits", e) for e in range(epochs)]
    losses = [place + 1.0 for place, (kind, _) in enumerate(diary.entries) if kind == "observe"]
    share = len(losses) // epochs
    means = [sum(losses[e * share : (e + 1) * share]) / share for e in range(epochs)]
    assert [event.loss for event in ends] == pytest.approx(means)


def test_samples_carry_the_index_of_their_task() -> None:
    learner = Learner(mlp(), Writing())
    for _ in range(3):
        learner.learn(Task((X, Y)))
    diary = learner.validate(Task((X, Y)))
    assert isinstance(diary, Diary)
    assert diary.tasks == [0] * 23 + [1] * 23 + [2] * 23
    assert learner.num_tasks == 3
