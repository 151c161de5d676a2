"""Inputs to evaluate or predict that differ in shape or type from those trained on."""

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


def trained(x: Tensor = BYTES) -> Learner:
    learner = Learner(mlp(), ER())
    learner.learn(Task((x, Y)))
    return learner


@pytest.mark.parametrize("part", ["test", "val"])
def test_all_parts_of_a_task_are_bytes_or_none_is(part: str) -> None:
    other = {part: (BYTES.float(), Y)}
    words = {"test": "test", "val": "validation"}[part]
    with pytest.raises(DataError, match=f"digits: the {words} data {REFUSED}"):
        Learner(mlp(), ER()).learn(Task((BYTES, Y), name="digits", **other))  # type: ignore[arg-type]


def test_other_types_are_rejected_in_evaluate_and_predict() -> None:
    learner = trained()
    with pytest.raises(DataError, match=f"june: the test data {REFUSED}"):
        learner.evaluate(Task((BYTES, Y), (BYTES.float(), Y), name="june"))
    with pytest.raises(DataError, match=f"the inputs to predict {REFUSED}"):
        learner.predict(BYTES.float())
    with pytest.raises(DataError, match=r"are torch\.uint8, but the model was trained on torch\.float32"):
        trained(BYTES / 255).predict(BYTES)


def test_permuted_digits_are_checked_too() -> None:
    """They are evaluated together, in a separate code path."""
    benchmark = PMNIST(tasks=2, samples=20, test_samples=30)
    tasks = benchmark.stream(seed=0)
    learner = Learner(nn.Sequential(nn.Linear(784, 10)), ER())
    learner.learn(Task((torch.rand(20, 784), torch.arange(20) % 10)))
    with pytest.raises(DataError, match=r"permutation 1: the test data are torch\.uint8"):
        learner.evaluate(tasks)


def test_custom_input_transform_may_accept_both() -> None:
    learner = Learner(mlp(), ER(), input_transform=lambda x: x / 255 if x.dtype == torch.uint8 else x)
    learner.learn(Task((BYTES, Y), (BYTES.float() / 255, Y)))
    assert torch.equal(learner.predict(BYTES), learner.predict(BYTES / 255))


@pytest.mark.parametrize("given", [BYTES[0], BYTES[:, :5], BYTES[:, None], torch.tensor(3, dtype=torch.uint8)], ids=str)
def test_shapes_that_the_model_rejects(given: Tensor) -> None:
    with pytest.raises(DataError, match=r"inputs to predict have shape .* trained on samples of shape \(12,\)"):
        trained().predict(given)


def test_test_data_of_another_shape_is_named() -> None:
    with pytest.raises(DataError, match=r"june: the test data have shape \(40, 5\), .* samples of shape \(12,\)"):
        trained().evaluate(Task((BYTES[:, :5], Y), (BYTES[:, :5], Y), name="june"))


def test_other_sizes_that_the_model_accepts_are_allowed() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    learner = Learner(model, ER())
    learner.learn(Task((torch.rand(8, 1, 6, 6), torch.arange(8) % 4)))
    assert learner.predict(torch.rand(5, 1, 9, 7)).shape == (5,)


def test_the_models_own_errors_are_not_changed() -> None:
    learner = trained()
    learner.model.forward = lambda x: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(ZeroDivisionError):
        learner.predict(BYTES)


def test_nan_outputs_predict_no_class() -> None:
    learner = trained(BYTES / 255)
    x = torch.rand(3, 12)
    x[1, 2] = torch.nan
    with pytest.raises(DataError, match="inputs to predict is NaN"):
        learner.predict(x)


def test_icarl_without_exemplars_of_a_class() -> None:
    """A class without exemplars is infinitely far away, which is not NaN."""
    learner = Learner(nn.Linear(12, 4), ICaRL())
    learner.learn(Task((BYTES / 255, Y % 2), head=range(2)))
    assert set(learner.predict(BYTES / 255).tolist()) <= {0, 1}


@pytest.mark.parametrize("method", ["learn", "validate"])
def test_learning_within_inference_mode(method: str) -> None:
    """The result is the same, bit for bit."""
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
