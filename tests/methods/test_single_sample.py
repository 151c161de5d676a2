"""Gradients on a single sample, which BatchNorm cannot normalize: the error names the setting that caused it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import steppe
from steppe.errors import SteppeError
from steppe.methods.base import MethodConfig

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 4
TASKS = [steppe.Task((X, Y), name="first"), steppe.Task((X, (Y + 1) % 4), name="second")]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


def with_positions() -> nn.Module:
    """Sixteen values per channel, even for a single sample."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.Unflatten(1, (1, 4, 4)), nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 4)
    )


def batch_of(**settings: int) -> MethodConfig:
    return steppe.AGEM(reference="batch", **settings)  # type: ignore[arg-type]


def learn(model: nn.Module, method: MethodConfig, **options: Any) -> list[int]:
    learner = steppe.Learner(model, method, seed=0)
    return [learner.learn(task, batch_size=10, **options).updates for task in TASKS]


REFUSED: dict[str, tuple[MethodConfig, str]] = {
    "ewc": (steppe.EWC(samples=1), "samples = 1 .* set samples to 2 or more"),
    "gem": (steppe.GEM(memory=2, tasks=2), "memory = 2 shared by tasks = 2 .* raise memory"),
    "a-gem": (steppe.AGEM(memory=2, tasks=2), "memory = 2 shared by tasks = 2 .* raise memory"),
    "a-gem, batch": (batch_of(memory=3, tasks=2), "memory = 3 shared by tasks = 2 .* raise memory"),
    "a-gem, reference": (batch_of(memory=8, tasks=2, reference_samples=1), "reference_samples = 1 .* 2 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_setting_is_named_before_the_task_is_learned(name: str) -> None:
    method, said = REFUSED[name]
    model = normed()
    learner = steppe.Learner(model, method, seed=0)
    failing = TASKS[0] if name == "ewc" else TASKS[1]
    if name != "ewc":
        learner.learn(TASKS[0], batch_size=10)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(SteppeError, match=said) as caught:
        learner.learn(failing, batch_size=10)
    assert not re.search("batch_size", str(caught.value))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


ENOUGH: dict[str, MethodConfig] = {
    "ewc": steppe.EWC(samples=2),
    "gem": steppe.GEM(memory=4, tasks=2),
    "a-gem": steppe.AGEM(memory=4, tasks=2),
    "a-gem, batch": batch_of(memory=4, tasks=2, reference_samples=2),
}


@pytest.mark.parametrize("name", ENOUGH)
def test_two_samples_are_enough(name: str) -> None:
    assert learn(normed(), ENOUGH[name]) == [2, 2]


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_accepts_single_samples_is_not_rejected(name: str) -> None:
    assert learn(with_positions(), REFUSED[name][0]) == [2, 2]


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "ewc"])
def test_frozen_statistics_accept_a_single_sample(name: str) -> None:
    assert learn(normed(), REFUSED[name][0], freeze_statistics=True) == [2, 2]


@pytest.mark.parametrize("name", REFUSED)
def test_the_check_draws_no_random_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws the same numbers with and without the check."""
    found = []
    for looks in (True, False):
        if not looks:
            for module in ("ewc", "parts.task_memory_method"):
                monkeypatch.setattr(f"steppe.methods.{module}.require_batchable", lambda *_: None)
        torch.manual_seed(0)
        model = with_positions()
        learn(model, REFUSED[name][0])
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)
