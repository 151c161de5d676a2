"""Inputs to be tested on or predicted for that are not like those that were learnt from."""

from __future__ import annotations

import copy

import pytest
import torch
from own_models import convolutional
from torch import Tensor, nn

from steppe import ER, PMNIST, DataError, ICaRL, Learner, Task

BYTES = torch.randint(0, 256, (40, 12), dtype=torch.uint8)
Y = torch.arange(40) % 4
REFUSED = r"are torch\.float32, but the model was trained on torch\.uint8, and only bytes are scaled .* the same type"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def learnt(x: Tensor = BYTES) -> Learner:
    learner = Learner(mlp(), ER())
    learner.learn(Task((x, Y)))
    return learner


@pytest.mark.parametrize("part", ["test", "val"])
def test_a_task_has_bytes_in_all_its_parts_or_in_none(part: str) -> None:
    other = {part: (BYTES.float(), Y)}
    words = {"test": "test", "val": "validation"}[part]
    with pytest.raises(DataError, match=f"digits: the {words} data {REFUSED}"):
        Learner(mlp(), ER()).learn(Task((BYTES, Y), name="digits", **other))  # type: ignore[arg-type]


def test_other_inputs_are_refused_when_it_is_tested_or_asked() -> None:
    learner = learnt()
    with pytest.raises(DataError, match=f"june: the test data {REFUSED}"):
        learner.evaluate(Task((BYTES, Y), (BYTES.float(), Y), name="june"))
    with pytest.raises(DataError, match=f"the inputs to predict {REFUSED}"):
        learner.predict(BYTES.float())
    with pytest.raises(DataError, match=r"are torch\.uint8, but the model was trained on torch\.float32"):
        learnt(BYTES / 255).predict(BYTES)


def test_digits_in_other_orders_are_looked_at_too() -> None:
    """They are tested together, in a way of their own."""
    benchmark = PMNIST(tasks=2, samples=20, test_samples=30)
    tasks = benchmark.stream(seed=0)
    learner = Learner(nn.Sequential(nn.Linear(784, 10)), ER())
    learner.learn(Task((torch.rand(20, 784), torch.arange(20) % 10)))
    with pytest.raises(DataError, match=r"permutation 1: the test data are torch\.uint8"):
        learner.evaluate(tasks)


def test_a_prepare_of_one_s_own_may_take_both() -> None:
    learner = Learner(mlp(), ER(), input_transform=lambda x: x / 255 if x.dtype == torch.uint8 else x)
    learner.learn(Task((BYTES, Y), (BYTES.float() / 255, Y)))
    assert torch.equal(learner.predict(BYTES), learner.predict(BYTES / 255))


@pytest.mark.parametrize("given", [BYTES[0], BYTES[:, :5], BYTES[:, None], torch.tensor(3, dtype=torch.uint8)], ids=str)
def test_shapes_that_the_model_does_not_take(given: Tensor) -> None:
    with pytest.raises(DataError, match=r"inputs to predict have shape .* trained on samples of shape \(12,\)"):
        learnt().predict(given)


def test_a_test_of_another_shape_is_named() -> None:
    with pytest.raises(DataError, match=r"june: the test data have shape \(40, 5\), .* samples of shape \(12,\)"):
        learnt().evaluate(Task((BYTES[:, :5], Y), (BYTES[:, :5], Y), name="june"))


def test_another_size_that_the_model_takes_is_welcome() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    learner = Learner(model, ER())
    learner.learn(Task((torch.rand(8, 1, 6, 6), torch.arange(8) % 4)))
    assert learner.predict(torch.rand(5, 1, 9, 7)).shape == (5,)


def test_the_model_s_own_errors_are_its_own() -> None:
    learner = learnt()
    learner.model.forward = lambda x: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(ZeroDivisionError):
        learner.predict(BYTES)


def test_no_class_is_named_for_what_is_no_number() -> None:
    learner = learnt(BYTES / 255)
    x = torch.rand(3, 12)
    x[1, 2] = torch.nan
    with pytest.raises(DataError, match="inputs to predict is NaN"):
        learner.predict(x)


def test_icarl_may_know_nothing_of_a_class() -> None:
    """What it has no exemplars of is infinitely far, which is a number."""
    learner = Learner(nn.Linear(12, 4), ICaRL())
    learner.learn(Task((BYTES / 255, Y % 2), head=range(2)))
    assert set(learner.predict(BYTES / 255).tolist()) <= {0, 1}


@pytest.mark.parametrize("method", ["learn", "validate"])
def test_within_inference_mode_it_learns(method: str) -> None:
    """What it learns without, to the bit."""
    plain = Learner(convolutional(), ER())
    learner = copy.deepcopy(plain)
    task = Task((torch.rand(40, 1, 4, 4), Y))
    with torch.inference_mode():
        getattr(learner, method)(task)
        assert torch.is_inference_mode_enabled()
    learner.learn(task)
    for _ in range(2 if method == "learn" else 1):
        plain.learn(task)
    assert all(map(torch.equal, plain.model.parameters(), learner.model.parameters()))
