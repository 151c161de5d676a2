"""Custom metrics: correct over batches and within heads, and one clear error if they fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_tasks import Small, task
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steppe import ER, AccuracyMatrix, ICaRL, Learner, Task, UsageError
from steppe.learning import evaluation


def right(output: Tensor, target: Tensor) -> float:
    return 100 * float((output.argmax(1) == target).double().mean())


class CountsRight:
    """Has the interface of a torchmetrics metric."""

    def __init__(self) -> None:
        self.seen = self.right = 99

    def reset(self) -> None:
        self.seen = self.right = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.seen += len(target)
        self.right += int((output.argmax(1) == target).sum())

    def compute(self) -> Tensor:
        return torch.tensor(100 * self.right / self.seen)


@pytest.mark.parametrize("method", [ER(), ICaRL(exemplars=20)])
@pytest.mark.parametrize("metric", [right, CountsRight()])
def test_accuracy_as_own_metric(metric: Any, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In uneven batches, each within its head, and with a method whose scores are not logits."""
    monkeypatch.setattr(evaluation, "BATCH", 4)  # of ten
    torch.manual_seed(0)
    model = Small()
    own, plain = Learner(model, method, metric=metric), Learner(model, method)
    for learner in (own, plain):
        learner.learn([task(0), task(1)], epochs=2)
        assert own.evaluate([task(0), task(1)]) == pytest.approx(
            [
                100 * float((own.predict(t.test.x, head=t.head) == t.test.y).double().mean())  # type: ignore[union-attr]
                for t in (task(0), task(1))
            ]
        )


def test_a_metric_is_averaged_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "BATCH", 4)
    learner = Learner(Small(), ER(), metric=lambda output, target: torch.tensor(float(len(target))))
    assert learner.evaluate(task(0)) == [(4 * 4 + 4 * 4 + 2 * 2) / 10]


def test_a_metric_of_a_chain_with_shared_samples() -> None:
    learner = Learner(nn.Linear(4, 3), ER(), metric=lambda output, target: output[:, 0].mean())
    x = torch.rand(10, 4)
    y = torch.arange(10) % 3
    assert learner.evaluate(Task((x, y), (x, y))) == pytest.approx([float(learner.outputs(x)[:, 0].mean())])


def broken(output: Tensor, target: Tensor) -> float:
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    ("metric", "match"),
    [
        (broken, "task 0: `metric` failed: RuntimeError: no such thing"),
        (lambda output, target: output, "must return one number"),
        (lambda output, target: None, "must return one number, got None"),
        (lambda output, target: float("nan"), "returned nan"),
    ],
)
def test_failing_metric_is_an_error(metric: Any, match: str) -> None:
    learner = Learner(Small(), ER(), metric=metric)
    learner.learn(task(0))
    before = [p.detach().clone() for p in learner.model.parameters()]
    with pytest.raises(UsageError, match=match):
        learner.evaluate(task(0))
    assert all(torch.equal(p, q) for p, q in zip(learner.model.parameters(), before, strict=True))
    learner.learn(task(1))
    assert learner.num_tasks == 2


@pytest.mark.parametrize(("metric", "match"), [(CountsRight, "pass an instance"), (3, "must be a function")])
def test_invalid_metrics_are_rejected(metric: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Learner(Small(), ER(), metric=metric)


def test_accuracy_is_the_default_metric_of_a_custom_loss() -> None:
    torch.manual_seed(0)
    learner = Learner(Small(), ER(), loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    learner.learn(task(0), epochs=3)
    (found,) = learner.evaluate(task(0))
    test = task(0).test
    assert found == right(learner.outputs(test.x)[:, :2], test.y)  # type: ignore[union-attr]


def test_predict_proba() -> None:
    torch.manual_seed(0)
    learner = Learner(Small(), ER())
    learner.learn(task(0), epochs=2)
    x = task(0).test.x  # type: ignore[union-attr]
    for head in (None, range(1, 3)):
        found = learner.predict_proba(x, head=head)
        columns = head or range(4)
        by_hand = torch.softmax(learner.outputs(x)[:, columns.start : columns.stop], 1)
        torch.testing.assert_close(found[:, columns.start : columns.stop], by_hand)
        torch.testing.assert_close(found.sum(1), torch.ones(10))
        assert torch.equal(found.argmax(1), learner.predict(x, head=head))
    assert torch.equal(found[:, 0], torch.zeros(10))


def test_models_without_probabilities() -> None:
    x = task(0).test.x  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"learner\.outputs"):
        Learner(Small(), ER(), loss=cross_entropy).predict_proba(x)
    learner = Learner(Small(), ICaRL(exemplars=20))
    learner.learn(task(0))
    with pytest.raises(UsageError, match="ICaRL does not predict by logits"):
        learner.predict_proba(x)


def test_forgetting_if_lower_is_better() -> None:
    errors = [[1.0], [3.0, 2.0], [2.0, 5.0, 1.0]]
    matrix = AccuracyMatrix(errors, higher_is_better=False)
    negated = AccuracyMatrix([[-value for value in row] for row in errors])
    assert matrix.forgetting == negated.forgetting == 2.0
    assert matrix.bwt == 2.0
