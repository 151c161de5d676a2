"""Naming the output layer instead of letting it be detected."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import Words
from torch import Tensor, nn

import steppe
from steppe import FSDGPM, GPM, Learner, ModelError, Task, UsageError

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 2


class Mixed(nn.Module):
    """Its logits are mixed after the last layer, so that the head cannot be detected."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.act, self.head = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)
        self.register_buffer("mix", torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.body(x))) @ self.mix


class Cosine(nn.Module):
    """A head whose matrix belongs to a layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.prototypes = nn.Linear(6, 8), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.body(x), dim=1) @ nn.functional.normalize(self.prototypes, dim=1).T


def task(first: int) -> Task:
    data = X, Y + first
    return Task(data, data, head=range(first, first + 2), name=f"task {first // 2}")


def covered(learner: Learner) -> list[str]:
    method: Any = learner._method
    return sorted(method.memory.covered)


@pytest.mark.parametrize("head", ["head", "head.weight"])
@pytest.mark.parametrize("method", [GPM(basis_samples=20), FSDGPM(buffer=20, basis_samples=10)], ids=["gpm", "fs-dgpm"])
def test_a_named_head_is_not_projected(method: steppe.MethodConfig, head: str) -> None:
    with pytest.raises(
        ModelError, match=r"no single layer computes the model's output: name the head with head='\.\.\.'"
    ):
        Learner(Mixed(), method).learn(task(0))
    learner = Learner(Mixed(), method, head=head)
    learner.learn(task(0))
    learner.learn(task(2))
    assert covered(learner) == ["body.weight"]


def test_in_single_head_learning_a_named_head_is_projected_too(tmp_path: Path) -> None:
    learner = Learner(Mixed(), GPM(basis_samples=20), head="head")
    learner.learn(Task((X, Y)))
    assert covered(learner) == ["body.weight", "head.weight"]
    learner.save(tmp_path / "learner")
    assert covered(steppe.load(tmp_path / "learner", Mixed())) == ["body.weight", "head.weight"]


def test_a_named_head_without_a_rule_causes_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner = Learner(Cosine(), GPM(basis_samples=20), head="prototypes")
        learner.learn(task(0))
    assert covered(learner) == ["body.weight"]


@pytest.mark.parametrize("head", ["head", "head.weight", "table"])
def test_a_named_head_may_be_tied_to_an_embedding(head: str, tmp_path: Path) -> None:
    words = torch.randint(0, 12, (40, 5), generator=torch.Generator().manual_seed(0))
    tied = Task((words, Y), head=range(0, 2))
    with pytest.raises(ModelError, match=r"'table.weight' is shared with 'head'"):
        Learner(Words(tied=True), GPM(basis_samples=20)).learn(tied)
    learner = Learner(Words(tied=True), GPM(basis_samples=20), head=head)
    learner.learn(tied)
    learner.save(tmp_path / "learner")
    assert covered(learner) == covered(steppe.load(tmp_path / "learner", Words(tied=True))) == ["hidden.weight"]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("haed", r"unknown layer or weight of the model, given as head, 'haed'\. Did you mean 'head'\?"),
        ("", "head must be the name of a layer or a weight, got ''"),
        (nn.Linear(2, 2), "head must be the name of a layer or a weight, got Linear"),
        ("act", "head = 'act' has no weights; pass the name of the layer that returns the logits"),
    ],
)
def test_an_invalid_head_is_an_error(head: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Learner(Mixed(), GPM(), head=head)


def test_the_head_is_saved(tmp_path: Path) -> None:
    expected = Learner(Mixed(), GPM(basis_samples=20), head="head")
    expected.learn(task(0))
    expected.save(tmp_path / "learner")
    loaded = steppe.load(tmp_path / "learner", Mixed())
    for learner in (expected, loaded):
        learner.learn(task(2))
    assert covered(loaded) == ["body.weight"]
    assert all(map(torch.equal, expected.model.parameters(), loaded.model.parameters()))


def test_state_with_another_head_is_rejected() -> None:
    state = Learner(Mixed(), GPM(), head="head").state_dict()
    with pytest.raises(UsageError, match="use the same arguments"):
        Learner(Mixed(), GPM()).load_state_dict(state)


def test_older_states_without_a_head_name_load() -> None:
    state = Learner(Mixed(), GPM()).state_dict()
    del state["head"]
    Learner(Mixed(), GPM()).load_state_dict(state)
