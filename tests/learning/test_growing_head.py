"""Heads that grow: new classes get outputs of their own, and everything learnt so far stays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from learner_states import same_state, timeless
from small_tasks import SEQUENTIAL, Small, images, settings_of, task
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from steppe import ER, EWC, DataError, DERPlusPlus, Finetune, Learner, ModelError, Task, UsageError
from steppe.learning import loop as training
from steppe.learning.events import Event, Progress
from steppe.methods.base import MethodConfig
from steppe.network.growing_head import GrowingHead
from steppe.runtime.rng import Streams

HOW: dict[str, Any] = {"batch_size": 6}


def learner_of(method: str, outputs: int = 2, **more: Any) -> Learner:
    torch.manual_seed(0)
    return Learner(Small(outputs), small_settings(method), head="head", grow=True, seed=3, **more)


def small_settings(method: str) -> MethodConfig:
    return settings_of(method, "cifar100-superclass")


def class_task(number: int) -> Task:
    """Two new classes, and no head: the task is not known when it is tested."""
    rows = range(2 * number, 2 * number + 2)
    return Task(images(24, rows, number), images(10, rows, 50 + number), name=f"task {number}")


def tasks_of(method: str) -> Any:
    return task if method == "icarl" else class_task


@pytest.mark.parametrize("method", SEQUENTIAL)
@pytest.mark.parametrize("multi_head", [True, False])
def test_new_classes_are_learnt_and_survive_a_file(method: str, multi_head: bool, tmp_path: Path) -> None:
    if method == "icarl" and not multi_head:
        pytest.skip("needs heads")
    learner, make = learner_of(method), task if multi_head else class_task
    for number in range(3):
        learner.learn(make(number), **HOW)
        assert learner.model.head.out_features == len(learner.model.head.weight) == 2 * number + 2  # type: ignore[union-attr, arg-type]
        assert len(learner.evaluate([make(each) for each in range(number + 1)])) == number + 1
        learner.save(tmp_path / "learner")
        loaded = steppe.load(tmp_path / "learner", Small(2))
        assert same_state(timeless(loaded), timeless(learner))
        learner = loaded
    assert learner.predict(images(5, range(6), 9)[0]).max() < 6


@pytest.mark.parametrize("method", SEQUENTIAL)
def test_a_file_from_within_a_task_resumes_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_REPORT_EVERY", 0.0)
    file, make, learner = tmp_path / "learner", tasks_of(method), learner_of(method)
    learner.learn(make(0), **HOW)

    def save_once(event: Event) -> None:
        if isinstance(event, Progress) and not file.exists():
            learner.save(file)

    learner.learn(make(1), callback=save_once, **HOW)
    resumed = steppe.load(file, Small(2))
    assert resumed.has_pending_task
    resumed.learn(make(1), **HOW)
    assert same_state(timeless(resumed), timeless(learner))
    for each in (resumed, learner):
        each.learn(make(2), **HOW)
    assert same_state(timeless(resumed), timeless(learner))


@pytest.mark.parametrize("method", SEQUENTIAL)
def test_growing_leaves_what_is_there_as_it_is(method: str) -> None:
    """At the moment of growth: the rows, bit for bit, and the outputs, which another product may round differently."""
    learner, make = learner_of(method), tasks_of(method)
    learner.learn(make(0), **HOW)
    x = images(20, range(2), 5)[0]
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    scores = learner.model.eval()(x)
    learner._outputs_needed = 5
    learner._grow_head(make(0))
    after = dict(learner.model.state_dict())
    assert torch.equal(after["head.weight"][:2], before.pop("head.weight"))
    assert all(torch.equal(after[name], value) for name, value in before.items())
    torch.testing.assert_close(learner.model(x)[:, :2], scores, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", SEQUENTIAL)
def test_a_failed_task_leaves_the_head_as_it_was(method: str) -> None:
    make = tasks_of(method)
    failed, never = learner_of(method), learner_of(method)
    for number in range(3):
        before = failed.network.snapshot()
        data, head = images(24, range(2 * number, 2 * number + 2), number), make(number).head
        with pytest.raises(RuntimeError, match="broken"):
            failed.learn(Task(data, head=head, augment=_breaks_after(2)), **HOW)
        assert failed.model.head.out_features == never.model.head.out_features  # type: ignore[union-attr]
        failed.network.restore(before)
        assert same_state(timeless(failed), timeless(never)) or number == 0
        for each in (failed, never):
            each.learn(Task(data, head=head, augment=_breaks_after(100)), **HOW)
        assert same_state(timeless(failed), timeless(never))


def _breaks_after(batches: int) -> Any:
    left = [batches]

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("broken")
        return x

    return augment


@pytest.mark.parametrize("method", SEQUENTIAL)
def test_growing_in_steps_equals_growing_at_once(method: str) -> None:
    """Everything that has the head's shape: momentum, importances, rates, logits."""
    learner, make = learner_of(method), tasks_of(method)
    learner.learn(make(0), **HOW)
    steps, once = learner, learner_of(method)
    once.load_state_dict(copy.deepcopy(learner.state_dict()))
    for rows in (3, 4, 7):
        steps._outputs_needed = rows
        steps._grow_head(make(0))
    once._outputs_needed = 7
    once._grow_head(make(0))
    assert same_state(timeless(steps), timeless(once))


@hypothesis_settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_rows_depend_on_the_seed_and_their_number_alone(
    steps: list[int], width: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(width, 2, bias=bias, dtype=dtype)
    other, first = copy.deepcopy(layer), copy.deepcopy(layer.state_dict())
    state = torch.get_rng_state()
    head, at_once = GrowingHead(layer, "weight", Streams(5)), GrowingHead(other, "weight", Streams(5))
    for step in steps:
        head.resize(head.rows + step)
    at_once.resize(2 + sum(steps))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in other.state_dict().items())
    assert all(torch.equal(layer.state_dict()[name][:2], value) for name, value in first.items())
    assert all(bool((p.abs() <= width**-0.5).all()) for p in (layer.weight[2:], *([layer.bias[2:]] if bias else [])))
    head.resize(2)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in first.items())


def test_new_rows_are_spread_like_those_of_a_new_layer() -> None:
    layer = nn.Linear(100, 1)
    GrowingHead(layer, "weight", Streams(0)).resize(2001)
    new = layer.weight.detach()[1:]
    assert abs(float(new.mean())) < 1e-3
    assert float(new.std()) == pytest.approx(0.1 / 3**0.5, rel=0.01)
    assert float(layer.bias.detach()[1:].std()) == pytest.approx(0.1 / 3**0.5, rel=0.05)


def test_logits_that_were_not_stored_pull_at_nothing() -> None:
    """DER++ against a slow twin: the mean over the entries that were stored."""
    learner = learner_of("der++")
    learner.learn(class_task(0), **HOW)
    learner.learn(class_task(1), **HOW)
    method: Any = learner._method
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(5, 4, generator=generator, requires_grad=True)
    z = torch.randn(5, 4, generator=generator)
    z[:3, 2:] = torch.nan
    value = method._distance(output, z)
    kept = [(z[i, j] - output[i, j]) ** 2 for i in range(5) for j in range(4) if not z[i, j].isnan()]
    torch.testing.assert_close(value, torch.stack(kept).mean())
    (slope,) = torch.autograd.grad(value, output)
    assert bool(slope.isfinite().all())
    assert not bool(slope[:3, 2:].any())
    stored = method.replay.sample_with_extras(100)[1]
    assert stored.shape[1] == 4
    assert bool(stored[:, 2:].isnan().any())
    assert not bool(stored[:, :2].isnan().any())


def test_ewc_protects_old_rows_only() -> None:
    learner = Learner(Small(2), EWC(strength=1e5, clip=0.0, lr=1e-6), head="head", grow=True)
    learner.learn(class_task(0), **HOW)
    learner.learn(class_task(1), **HOW)
    importance = learner.state_dict()["method"]["penalty"]["importance"]["head.weight"]
    assert importance.shape == (4, 8)
    assert bool(importance.any())


def test_the_first_task_may_need_more_outputs_than_there_are() -> None:
    for settings in (steppe.LaMAML(), EWC(), DERPlusPlus(), steppe.FSDGPM(), steppe.GEM(memory=4, tasks=2)):
        learner = Learner(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1)), settings, head="2", grow=True)
        learner.learn(Task((torch.randn(12, 6), torch.arange(12) % 3)))
        assert learner.network.trainable["2.weight"].shape == (3, 5)


def test_classes_of_a_dataset_are_counted() -> None:
    data = TensorDataset(torch.randn(12, 6), torch.arange(12) % 5)
    learner = Learner(nn.Linear(6, 1), Finetune(), head="weight", grow=True)
    learner.learn(Task(data))
    assert learner.network.trainable["weight"].shape == (5, 6)
    with pytest.raises(DataError, match="labels are not known in advance; pass a Dataset"):
        learner.learn(Task(DataLoader(data)))
    learner.learn(Task(DataLoader(data), head=range(5)))


def test_classes_not_seen_yet_count_as_wrong() -> None:
    learner = Learner(nn.Linear(6, 2), Finetune(), head="weight", grow=True)
    x = torch.randn(12, 6)
    learner.learn(Task((x, torch.arange(12) % 2)))
    assert learner.evaluate(Task((x, torch.full((12,), 1)), (x, torch.full((12,), 4)))) == [0.0]
    with pytest.raises(DataError, match="labels -1"):
        learner.evaluate(Task((x, torch.full((12,), 1)), (x, torch.full((12,), -1))))


def test_validating_grows_nothing() -> None:
    learner = learner_of("er")
    learner.validate([class_task(0), class_task(4)])
    assert learner.model.head.out_features == 2  # type: ignore[union-attr]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.one(x))
        return output


class Fixed(nn.Module):
    """Returns the first two outputs, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x)
        return output[:, :2]


def test_a_head_that_cannot_grow_is_refused() -> None:
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    frozen[1].requires_grad_(False)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    nested = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    for model, head, words in (
        (nested, "0", r"Sequential, and grow=True needs a linear layer; name the layer itself, such as head='0.1'"),
        (nn.Sequential(nn.Conv2d(3, 2, 1)), "0", r"Conv2d.*name the torch.nn.Linear"),
        (normed, "0", "cannot grow; use a plain"),
        (frozen, "1", "is frozen"),
        (Tied(), "head", "shares a weight"),
    ):
        with pytest.raises(ModelError, match=words):
            Learner(model, ER(), head=head, grow=True)
    with pytest.raises(UsageError, match="needs head="):
        Learner(nn.Linear(4, 2), ER(), grow=True)
    with pytest.raises(UsageError, match="True or False"):
        Learner(nn.Linear(4, 2), ER(), grow=1, head="weight")  # type: ignore[arg-type]
    learner = Learner(Fixed(), ER(), head="head", grow=True)
    with pytest.raises(ModelError, match="has 4 outputs, but the model returns 2"):
        learner.learn(Task((torch.randn(8, 6), torch.arange(8) % 4)))
    assert learner.model.head.out_features == 2  # type: ignore[union-attr]
    assert learner.num_tasks == 0


def test_a_file_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    learner = learner_of("er")
    learner.learn(class_task(0), **HOW)
    learner.learn(class_task(1), **HOW)
    learner.save(tmp_path / "learner")
    with pytest.raises(UsageError, match="saved with grow=True"):
        Learner(Small(4), learner.settings, head="head", seed=3).load_state_dict(learner.state_dict())
    other = Small(2)
    other.hidden = nn.Linear(4, 8, bias=True)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ModelError, match=r"hidden\.bias"):
        steppe.load(tmp_path / "learner", other)
    assert same_state(before, dict(other.state_dict()))
    assert other.head.out_features == 2


def test_a_loss_of_ones_own_on_class_numbers_grows_too() -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    learner = Learner(Small(2), ER(), head="head", grow=True, loss=loss)
    for number in range(3):
        learner.learn(class_task(number), **HOW)
    assert learner.predict(class_task(2).train.first(4)[0]).max() < 6  # type: ignore[union-attr]
    assert len(learner.network.trainable["head.weight"]) == 6


@pytest.mark.parametrize("method", ["der++", "ewc", "la-maml"])
@pytest.mark.parametrize("streaming", [True, False])
def test_an_interrupt_never_splits_growth(method: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has its new rows and the method does not: growing is completed (a task is then rolled back)."""
    learner = learner_of(method)

    def learn(number: int) -> None:
        if streaming:
            learner.observe(images(6, range(2 * number, 2 * number + 2), number), update_every=100)
        else:
            learner.learn(class_task(number), **HOW)

    learn(0)
    kind: Any = type(learner._method)
    own, left = kind.grow_head, [1]

    def interrupted_once(self: Any, head: GrowingHead) -> None:
        if left.pop() if left else 0:
            raise KeyboardInterrupt
        own(self, head)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "grow_head", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            learn(1)
    assert learner.model.head.out_features == (4 if streaming else 2)  # type: ignore[union-attr]
    learn(1)
    learn(2)
    assert learner.model.head.out_features == 6  # type: ignore[union-attr]
    assert len(learner.evaluate([class_task(number) for number in range(3)])) == 3
