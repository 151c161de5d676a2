"""Regression, multi-label, soft labels, labels per pixel and per token, learned by every method that takes any loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from small_tasks import SEQUENTIAL, settings_of
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import steppe
from steppe import Learner, Task
from steppe.registry import METHODS

SMALLER = {"buffer": 20, "memory": 20, "basis_samples": 10, "tasks": 4}
ANY_LOSS = [name for name in SEQUENTIAL if METHODS[name].settings.takes_any_loss]  # type: ignore[attr-defined]


class Tagger(nn.Module):
    """Scores of three tags for every token; no labels are given for the padding, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.hidden(self.embed(x)).relu())
        return output


class Kind(NamedTuple):
    model: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    target: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


def dense(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))


def rows(generator: torch.Generator) -> Tensor:
    return torch.randn(24, 6, generator=generator)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.mT, target, ignore_index=-100)


KINDS = {
    "regression": Kind(dense(1), rows, lambda x: x.sum(1, keepdim=True).sin(), mse_loss),
    "one number": Kind(dense(1), rows, lambda x: x.prod(1).sign(), lambda output, y: mse_loss(output[:, 0], y)),
    "multi-label": Kind(dense(3), rows, lambda x: (x[:, :3] > 0).float(), binary_cross_entropy_with_logits),
    "soft labels": Kind(dense(3), rows, lambda x: x[:, :3].softmax(1), cross_entropy),
    "label smoothing": Kind(dense(3), rows, lambda x: x[:, :3].argmax(1), nn.CrossEntropyLoss(label_smoothing=0.2)),
    "per pixel": Kind(
        lambda: nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1)),
        lambda generator: torch.randn(24, 2, 5, 5, generator=generator),
        lambda x: (x.sum(1) > 0).long() + (x[:, 0] > 1).long(),
        cross_entropy,
    ),
    "per token": Kind(
        Tagger,
        lambda generator: torch.randint(9, (24, 7), generator=generator),
        lambda x: torch.where(x == 0, -100, x % 3),
        token_loss,
    ),
    "several steps ahead": Kind(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4), nn.Unflatten(1, (2, 2))),
        rows,
        lambda x: x[:, :4].cumsum(1).reshape(-1, 2, 2),
        mse_loss,
    ),
}


def settings(method: str) -> steppe.MethodConfig:
    made = settings_of(method, "")
    return made.replace(**{key: value for key, value in SMALLER.items() if key in made.as_dict()})


def tasks(kind: Kind) -> list[Task]:
    made = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        x, more = kind.inputs(generator), kind.inputs(generator)
        data = x, kind.target(x)
        made.append(Task(data, data, val=(more, kind.target(more)), name=f"task {number}"))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ANY_LOSS)
def test_every_method_learns_every_kind_of_target(method: str, kind: str, tmp_path: Any) -> None:
    """Two tasks with validation and replay; the second one resumed from a file goes on to the same bits."""
    chosen = KINDS[kind]
    arguments: dict[str, Any] = {"loss": chosen.loss, "metric": chosen.loss}
    first, second = tasks(chosen)
    torch.manual_seed(0)
    learner = Learner(chosen.model(), settings(method), **arguments)
    (before,) = learner.evaluate(first)
    learner.learn(first, epochs=12, batch_size=8, patience=4)
    (after,) = learner.evaluate(first)
    assert after < before

    def save(event: object) -> None:
        if isinstance(event, steppe.EpochEnded) and event.epoch == 0:
            learner.save(tmp_path / "learner")

    learner.learn(second, epochs=2, batch_size=8, callback=save)
    resumed = steppe.load(tmp_path / "learner", chosen.model(), **arguments)
    resumed.learn(second, epochs=2, batch_size=8)
    for one, other in zip(learner.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    x = first.test.x  # type: ignore[union-attr]
    torch.testing.assert_close(learner.outputs(x), learner.model.eval()(x))
    assert learner.evaluate(first) == pytest.approx([float(chosen.loss(learner.outputs(x), chosen.target(x)))])


def test_targets_are_cut_to_a_head() -> None:
    """Multi-label tasks with columns of their own: the loss by hand on these columns alone."""
    model = nn.Linear(6, 4)
    x = rows(torch.Generator().manual_seed(0))
    y = (torch.randn(24, 4, generator=torch.Generator().manual_seed(1)) > 0).float()
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append((output.detach().clone(), target.clone()))
        return binary_cross_entropy_with_logits(output, target)

    learner = Learner(model, steppe.ER(buffer=30), loss=loss, metric=binary_cross_entropy_with_logits)
    for head in (range(2), range(2, 4)):
        learner.learn(Task((x, y), head=head), batch_size=24)
    assert {tuple(target.shape[1:]) for _, target in seen} == {(2,)}
    columns = {tuple(sorted(map(tuple, target.tolist()))) for _, target in seen if len(target) == 24}
    assert columns == {tuple(sorted(map(tuple, y[:, part].tolist()))) for part in (slice(2), slice(2, 4))}
    expected = float(binary_cross_entropy_with_logits(learner.outputs(x)[:, 2:4], y[:, 2:4]))
    assert learner.evaluate(Task((x, y), (x, y), head=range(2, 4))) == pytest.approx([expected])


def test_a_batch_without_labels_is_named() -> None:
    """A mean over no tokens is no number."""
    x = torch.ones(8, 7, dtype=torch.int64)
    learner = Learner(Tagger(), steppe.ER(), loss=token_loss)
    with pytest.raises(steppe.DivergedError, match="the loss became nan"):
        learner.learn(Task((x, torch.full((8, 7), -100))))
