"""Custom losses: what they see, their results with every method, and what is rejected."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_tasks import SEQUENTIAL, Small, images, settings_of, task
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

import steppe
from steppe import ER, FSDGPM, DataError, Learner, ModelError, Task, UsageError
from steppe.network.heads import within_head
from steppe.network.network import Network
from steppe.registry import METHODS
from steppe.tensors.batch import Batch

SMALLER = {"buffer": 20, "memory": 20, "exemplars": 20, "basis_samples": 10, "tasks": 4}
ANY_LOSS = [name for name in SEQUENTIAL if METHODS[name].settings.takes_any_loss]  # type: ignore[attr-defined]


def settings(method: str) -> steppe.MethodConfig:
    made = settings_of(method, "")
    return made.replace(**{key: value for key, value in SMALLER.items() if key in made.as_dict()})


def chain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 12), nn.ReLU(), nn.Linear(12, 6, bias=False))


def learned(model: nn.Module, method: steppe.MethodConfig, tasks: list[Task], **arguments: Any) -> Learner:
    learner = Learner(model, method, seed=1, **arguments)
    for each in tasks:
        learner.learn(each, epochs=2, batch_size=8, patience=1)
    return learner


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("build", [Small, chain])
@pytest.mark.parametrize("method", ANY_LOSS)
def test_cross_entropy_as_own_loss_learns_the_same(method: str, build: Callable[..., nn.Module], heads: bool) -> None:
    """Also within heads, where a replay batch has samples of several: the mean over the samples is the same."""
    found = []
    for loss in (None, cross_entropy):
        torch.manual_seed(0)
        model = (Small(6) if build is Small else chain()).double()
        tasks = [task(n) for n in range(3)]
        if not heads:
            tasks = [Task((t.train.x, t.train.y), val=(t.val.x, t.val.y)) for t in tasks]  # type: ignore[union-attr]
        learned(model, settings(method), tasks, loss=loss)
        found.append([p.detach().clone() for p in model.parameters()])
    moved = 0.0
    for plain, own in zip(*found, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-9)
        moved += float(plain.abs().sum())
    assert moved > 0


@pytest.mark.parametrize("method", ANY_LOSS)
def test_every_method_lowers_a_loss_that_is_not_cross_entropy(method: str) -> None:
    """Multi-label targets: each sample has its class and the next one."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(output, (one_hot(y, 6) + one_hot((y + 1) % 6, 6)).to(output.dtype))

    torch.manual_seed(0)
    x, y = images(60, range(6), 3)
    model = Small(6)
    learner = Learner(model, settings(method), loss=loss, metric=lambda output, target: -loss(output, target))
    (before,) = learner.evaluate(Task((x, y), (x, y)))
    learner.learn(Task((x, y)), epochs=25, batch_size=10)
    (after,) = learner.evaluate(Task((x, y), (x, y)))
    assert after > before + 0.01


def test_mixed_heads_weigh_by_samples() -> None:
    network = Network(nn.Linear(3, 6).double(), loss=cross_entropy)
    for head in (range(2), range(2, 6), None):
        network.heads.add(head, 6)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    where = torch.tensor([0, 1, 1, 2, 0, 1, 1, 2, 1])
    y = torch.tensor([0, 2, 5, 0, 1, 3, 4, 5, 2])
    by_hand = torch.zeros((), dtype=torch.float64)
    for number in range(9):
        head = network.heads.ranges[int(where[number])] or range(6)
        row = network.model(x)[number, head.start : head.stop]
        by_hand -= torch.log_softmax(row, 0)[int(y[number]) - head.start] / 9
    torch.testing.assert_close(network.loss(Batch(x, y, where)), by_hand)


@pytest.mark.usefixtures("fast_paths_on")
def test_fast_path_differentiates_a_custom_loss() -> None:
    """A plain sum, whose gradient is an expanded tensor, on the chain of linear layers."""
    learner = Learner(chain(), FSDGPM(buffer=20, basis_samples=10), loss=lambda output, y: output.square().sum())
    before = float(learner.outputs(task(0).train.x).square().sum())  # type: ignore[attr-defined]
    learner.learn(Task((task(0).train.x, task(0).train.y)), epochs=3, batch_size=8)  # type: ignore[attr-defined]
    assert learner.network.chain is not None
    assert float(learner.outputs(task(0).train.x).square().sum()) < before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (torch.tensor([2, -100, 3]), torch.tensor([0, -100, 1])),
        (torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4)[:, 2:4]),
        (torch.arange(6.0).reshape(3, 2), torch.arange(6.0).reshape(3, 2)),
        (torch.arange(3.0), torch.arange(3.0)),
    ],
)
def test_within_head(target: Tensor, expected: Tensor) -> None:
    output = torch.randn(3, 4)
    cut, found = within_head(output, target, range(2, 4))
    assert torch.equal(cut, output[:, 2:4])
    assert torch.equal(found, expected)
    assert within_head(output, target, None) == (output, target)


def no_gradient(output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output.detach(), y)


def fails(output: Tensor, y: Tensor) -> Tensor:
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda output, y: 1.0, "must return the mean loss as a tensor with a single number .* got 1.0"),
        (lambda output, y: cross_entropy(output, y, reduction="none"), r"got a tensor of shape \(1,\)"),
        (lambda output, y: output.argmax(1).sum(), "int64"),
        (no_gradient, "no gradient"),
        (fails, r"failed on an output of shape \(1, 2\) and a target of shape \(1,\).*KeyError: 'weights'"),
    ],
)
def test_invalid_loss_is_rejected_before_anything_changes(loss: Any, match: str) -> None:
    model = Small()
    before = pickle.dumps([p.detach().numpy() for p in model.parameters()])
    learner = Learner(model, ER(), loss=loss)
    with pytest.raises(UsageError, match=match):
        learner.learn(task(0))
    assert learner.num_tasks == 0
    assert pickle.dumps([p.detach().numpy() for p in model.parameters()]) == before


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (nn.MSELoss, r"loss=MSELoss\(...\)"),
        ("mse", "must be a function"),
        (nn.Linear(2, 1), "trainable parameters"),
    ],
)
def test_invalid_loss_arguments_are_rejected(loss: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Learner(Small(), ER(), loss=loss)


def test_classification_methods_reject_custom_losses() -> None:
    with pytest.raises(UsageError, match="ICaRL works with class numbers and cross-entropy only"):
        Learner(Small(), steppe.ICaRL(), loss=cross_entropy)


def test_loss_that_fails_within_a_task_is_rolled_back() -> None:
    calls = 0

    def loss(output: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise ValueError("no such class")
        return cross_entropy(output, y)

    learner = Learner(Small(), ER(buffer=10), loss=loss)
    learner.learn(task(0), batch_size=8)
    calls = 4
    state = learner.state_dict()["method"]["replay"]["stored"].x.clone()
    with pytest.raises(UsageError, match="no such class"):
        learner.learn(task(1), batch_size=8)
    assert learner.num_tasks == 1
    assert torch.equal(learner.state_dict()["method"]["replay"]["stored"].x, state)
    learner.learn(task(1), batch_size=8)
    assert learner.num_tasks == 2


@pytest.mark.parametrize("optimizer", [None, lambda params: torch.optim.AdamW(params)])
def test_a_loss_that_becomes_nan_loses_nothing(optimizer: Any) -> None:
    """Though the loss is read only now and then, when the weights have followed it."""
    worth = 1.0

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y) * worth

    learner = Learner(Small(), ER(), loss=loss, optimizer=optimizer)
    learner.learn(task(0))
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    worth = torch.nan
    with pytest.raises(steppe.DivergedError, match="the loss became nan in task 'task 1'"):
        learner.learn(task(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.state_dict().items())
    worth = 1.0
    learner.learn(task(1))
    assert learner.num_tasks == 2


def test_heads_need_rows() -> None:
    pixels = nn.Sequential(nn.Conv2d(3, 2, 1))
    learner = Learner(pixels, ER(), loss=lambda output, y: output.square().mean())
    with pytest.raises(UsageError, match=r"output has shape \(1, 2, 6, 6\); leave out the head"):
        learner.learn(task(0))
    x, y = images(12, range(2), 0)
    learner.learn(Task((x, y)))
    assert learner.outputs(x).shape == (12, 2, 6, 6)
    for call in (learner.predict, learner.evaluate):
        with pytest.raises(UsageError, match=r"learner.outputs\(x\)|metric="):
            call(x if call == learner.predict else Task((x, y), (x, y)))  # type: ignore[operator]


def test_output_without_samples_is_rejected() -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x.mean((0, 2, 3)) * self.weight).sum()

    with pytest.raises(ModelError, match=r"first dimension counts the samples, \(n, ...\), got \(\)"):
        Learner(Total(), ER(), loss=lambda output, y: output).learn(task(0))


def test_labels_outside_the_head_are_rejected_with_a_custom_loss() -> None:
    x, y = images(12, range(4), 0)
    with pytest.raises(DataError, match="outside the head"):
        Learner(Small(), ER(), loss=cross_entropy).learn(Task((x, y), head=range(2)))


def test_a_saved_learner_needs_its_loss(tmp_path: Any) -> None:
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    torch.manual_seed(0)
    learner = Learner(Small(), ER(), loss=smoothed)
    learner.learn(task(0))
    learner.save(tmp_path / "learner")
    with pytest.raises(UsageError, match="saved with its own `loss`"):
        steppe.load(tmp_path / "learner", Small())
    again = steppe.load(tmp_path / "learner", Small(), loss=smoothed)
    for each in (learner, again):
        each.learn(task(1))
    for one, other in zip(learner.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    plain = Learner(Small(), ER())
    plain.save(tmp_path / "plain")
    with pytest.raises(UsageError, match="saved without a loss"):
        steppe.load(tmp_path / "plain", Small(), loss=smoothed)


def test_random_loss_draws_from_the_learner(tmp_path: Any) -> None:
    """The user's generators do not change, and a second learner draws the same numbers."""

    def noisy(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output + torch.randn_like(output), y)

    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = chain()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        learned(model, ER(), [task(0)], loss=noisy)
        assert torch.equal(torch.get_rng_state(), before)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
