"""An interrupted task is resumed only with its own data, not with other data of the same name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learner_states import same, weights
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import steppe
from steppe import Learner, Task
from steppe.checkpoint.io import read_state, write_state
from steppe.errors import UsageError
from steppe.learning.events import Event

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


def save_within_task(file: Path, given: Task | list[Task]) -> Learner:
    """Save a learner within these tasks, and let it learn them to the end."""

    def save_once(event: Event) -> None:
        if not file.exists():
            one.save(file)

    one = Learner(nn.Linear(6, 4), steppe.Finetune())
    one.learn(given, epochs=2, callback=save_once)
    return one


def changed(at: int) -> Tensor:
    y = Y.clone()
    y[at] = 1 - y[at]
    return y


OTHERS: dict[str, tuple[Callable[[], Task | list[Task]], str]] = {
    "inputs": (lambda: Task((X.flip(0), Y), head=range(2)), "'task' now has other training samples"),
    "the first input": (lambda: Task((torch.cat([X[1:2], X[1:]]), Y), head=range(2)), "other training samples"),
    "the last input": (lambda: Task((torch.cat([X[:-1], X[:1]]), Y), head=range(2)), "other training samples"),
    "a label": (lambda: Task((X, changed(17)), head=range(2)), "'task' now has other training samples"),
    "bytes": (lambda: Task((X.to(torch.uint8), Y), head=range(2)), "other training samples"),
    "fewer": (lambda: Task((X[:30], Y[:30]), head=range(2)), "'task' now has 30 training samples instead of 40"),
    "a smaller dataset": (lambda: Task(TensorDataset(X[:30], Y[:30]), head=range(2)), "30 training samples"),
    "a head": (lambda: Task((X, Y), head=range(3)), r"'task' now has the head range\(0, 3\) instead of range\(0, 2\)"),
    "no head": (lambda: Task((X, Y)), r"'task' now has the head None instead of range\(0, 2\)"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_data_of_the_same_name_is_rejected(case: str, tmp_path: Path) -> None:
    """All tasks without a name share the default name."""
    save_within_task(tmp_path / "file", Task((X, Y), head=range(2)))
    make, message = OTHERS[case]
    other = steppe.load(tmp_path / "file", nn.Linear(6, 4))
    before = weights(other.model)
    with pytest.raises(UsageError, match=f"saved in the middle of 'task', but .*{message}"):
        other.learn(make(), epochs=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(other.model).items())
    assert other.has_pending_task


def test_other_tasks_between_the_first_and_the_last_are_rejected(tmp_path: Path) -> None:
    first, second, third = (Task((X, part), name=name) for part, name in ((Y, "a"), (changed(3), "b"), (Y, "c")))
    one = save_within_task(tmp_path / "file", [first, second, third])
    for given, says in (([first, third], "got 2 tasks instead of 3"), ([first] * 2 + [third], "'a' now has other")):
        with pytest.raises(UsageError, match=f"in the middle of 'a to c, together', but {says}"):
            steppe.load(tmp_path / "file", nn.Linear(6, 4)).learn(given, epochs=2)
    other = steppe.load(tmp_path / "file", nn.Linear(6, 4))
    other.learn([first, second, third], epochs=2)
    assert same(one, other)


SAME: dict[str, Callable[[], Task]] = {
    "copies": lambda: Task((X.clone(), Y.clone()), head=range(2)),
    "arrays": lambda: Task((X.numpy(), Y.numpy()), head=range(2)),
    "smaller labels": lambda: Task((X, Y.to(torch.uint8)), head=range(2)),
    "rounded otherwise": lambda: Task((X * (1 + 2**-23), Y), head=range(2)),
    "a dataset": lambda: Task(TensorDataset(X, Y), head=range(2)),
}


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("old", [False, True])
def test_the_same_data_in_other_forms_is_accepted(case: str, old: bool, tmp_path: Path) -> None:
    """States of older versions, without a description of the data, accept any."""
    one = save_within_task(tmp_path / "file", Task((X, Y), head=range(2)))
    if old:
        state = read_state(tmp_path / "file", "learner")
        del state["fitting"]["tasks"]
        write_state(tmp_path / "file", "learner", state)
    other = steppe.load(tmp_path / "file", nn.Linear(6, 4))
    other.learn(SAME[case](), epochs=2)
    assert same(one, other) or case == "rounded otherwise"
