"""Validation, learning-rate decay, best weights, frozen norm layers, and every preset on small data."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from own_images import synthetic
from small_tasks import SEQUENTIAL, Small, images, settings_of, task
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steppe import ER, FSDGPM, DataError, Finetune, LaMAML, Learner, Task, TrainingConfig
from steppe.data import cifar100, tiny_imagenet
from steppe.errors import DivergedError
from steppe.experiments import run as experiment
from steppe.experiments.config import RunConfig
from steppe.experiments.run import run
from steppe.learning.events import EpochEnded, Event
from steppe.learning.loop import Validation
from steppe.learning.task_group import TaskGroup
from steppe.methods.base import MethodConfig
from steppe.network.network import Network
from steppe.registry import METHODS
from steppe.tensors.batch import Batch

BENCHMARKS = ("cifar100-split", "cifar100-superclass", "tiny-imagenet", "pmnist", "pmnist-60k")


class Paced:
    """A method of which only the learning rate matters."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def decay_lr(self, divisor: float) -> float:
        self.lr /= divisor
        return self.lr

    def prediction_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def weights_restored(self) -> None:
        pass


class Scripted(TaskGroup):
    """Validation losses as given; the weight counts the epochs."""

    def __init__(self, losses: list[float], network: Network) -> None:
        super().__init__([task(0)], 0)
        self.script, self.model = iter(losses), network.model

    def validation_loss(self, network: Network, outputs: int, size: int = 1024) -> float:
        return next(self.script)


def counting() -> Network:
    model = nn.Linear(1, 1, bias=False)
    model.register_buffer("statistics", torch.zeros(1))
    nn.init.zeros_(model.weight)
    return Network(model)


def expected(losses: list[float], lr: float, training: TrainingConfig) -> tuple[int, float, list[float]]:
    """The specification, step by step: the epoch of the best weights, the final lr, and the lr after each epoch."""
    best, chosen, patience, lrs = math.inf, 0, training.patience, []
    for epoch, loss in enumerate(losses):
        if loss < best:
            best, chosen, patience = loss, epoch, training.patience
        else:
            patience -= 1
            if patience <= 0:
                lr /= training.lr_divisor
                if lr < training.lr_min:
                    lrs.append(lr)
                    break
                patience = training.patience
        lrs.append(lr)
    return chosen, lr, lrs


@given(
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from([1e-5, 1e-3, 0.004, 0.005, 0.00125]),
)
@example([0.1] * 20, 1, 0.005)  # a first decay to exactly lr_min, which is not below it
@example([0.1] * 20, 2, 0.00125)
def test_validation_follows_the_specification(losses: list[float], patience: int, lr_min: float) -> None:
    training = TrainingConfig(epochs=len(losses), patience=patience, lr_min=lr_min)
    network, method = counting(), Paced(0.01)
    curriculum = Scripted(losses, network)
    validation = Validation(method, network, curriculum, 10, training)  # type: ignore[arg-type]
    lrs = []
    for epoch in range(len(losses)):
        with torch.no_grad():
            network.model.weight.fill_(epoch)
            network.model.statistics.fill_(epoch)
        goes_on = validation.should_continue()
        lrs.append(method.lr)
        if not goes_on:
            break
    validation.restore_best()
    chosen, lr, wanted = expected(losses, 0.01, training)
    assert [float(tensor) for tensor in network.snapshot().values()] == [chosen, chosen]
    assert method.lr == pytest.approx(lr)
    assert lrs == pytest.approx(wanted)


def test_the_validation_loss_is_that_of_all_heads_in_eval_mode() -> None:
    torch.manual_seed(0)
    network = Network(Small())
    tasks = [task(0), task(1)]
    for number in range(2):
        network.heads.add(range(2 * number, 2 * number + 2), 4)
    before = network.snapshot()
    total = torch.zeros(())
    network.model.eval()
    for each in tasks:
        assert each.val is not None
        assert each.head is not None
        x, y = next(iter(each.val.batches(99, None)))
        logits = network.model(x)[:, each.head.start : each.head.stop]
        total += cross_entropy(logits, y - each.head.start, reduction="sum").detach()
    network.model.train()
    assert TaskGroup(tasks, 0).validation_loss(network, 10, size=4) == pytest.approx(float(total) / 18, rel=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.snapshot().items())


@pytest.mark.parametrize("method", [Finetune(lr=0.2), ER(lr=0.2, buffer=10), FSDGPM(lr=0.2, buffer=10)])
def test_best_weights_are_restored_and_lr_is_reset(method: MethodConfig) -> None:
    """All validation labels are wrong, so learning increases the loss: the best epoch's weights and running statistics
    are restored, and the next task starts with the initial lr."""
    torch.manual_seed(1)
    learner = Learner(Small(), method)
    seen: list[EpochEnded] = []
    states: list[dict[str, Tensor]] = []

    def callback(event: Event) -> None:
        if isinstance(event, EpochEnded):
            seen.append(event)
            states.append(learner.network.snapshot())

    for number in range(2):
        seen.clear()
        states.clear()
        rows = range(2 * number, 2 * number + 2)
        x, y = images(9, rows, 90 + number)
        contrary = Task(images(24, rows, number), val=(x, 4 * number + 1 - y), head=rows)
        learner.learn(contrary, epochs=8, batch_size=6, patience=1, callback=callback)
        losses = [event.validation_loss for event in seen]
        best = min(range(len(seen)), key=lambda epoch: losses[epoch] or math.inf)
        assert best < len(seen) - 1, "the case must tell the best epoch from the last"
        for name, tensor in learner.network.snapshot().items():
            assert torch.equal(tensor, states[best][name]), name
        cuts = [event.lr for event in seen if event.lr is not None]
        assert cuts[0] == pytest.approx(0.1)  # halved from the initial value, in the second task again


def test_decay_clears_the_momentum_and_halves_every_step_size() -> None:
    learner = Learner(Small(), FSDGPM(lr=0.02, ascent_lr=0.05, importance_lr=0.04, buffer=10))
    learner.learn(task(0), batch_size=6)
    method: Any = learner.validate(task(1))
    learner.network.heads.add(range(2, 4), 4)
    method.begin_task()
    x, y = images(6, range(2, 4), 1)
    method.observe(Batch(x, y, torch.ones_like(y)))
    assert method.descent._velocity
    assert method.decay_lr(2.0) == pytest.approx(0.01)
    assert method.ascent.lr == pytest.approx(0.025)
    assert method.memory.rule.lr == pytest.approx(0.02)
    assert not method.descent._velocity
    assert method.decay_lr(2.0) == pytest.approx(0.005)
    method.begin_task()
    assert (method.descent.lr, method.ascent.lr, method.memory.rule.lr) == (0.02, 0.05, 0.04)


def test_decay_shortens_la_mamls_steps_but_not_its_rates() -> None:
    """With half the step size, the outer step is half as long for the same gradient."""
    steps = []
    for divisor in (1.0, 2.0):
        torch.manual_seed(0)
        learner = Learner(Small(), LaMAML(rate_lr=0.0, inner_steps=1, buffer=10, clip=1e-3))
        method: Any = learner.validate(task(0))
        learner.network.heads.add(range(2), 4)
        method.begin_task()
        if divisor > 1:
            assert method.decay_lr(divisor) == pytest.approx(0.15 / divisor)
        rates = {name: rate.clone() for name, rate in method.rates.items()}
        gradient = {name: torch.ones_like(p) for name, p in learner.network.trainable.items()}
        before = learner.network.snapshot()
        method._step(type("Found", (), {"rates": gradient, "weights": gradient})())
        after = learner.network.snapshot()
        steps.append(torch.cat([(after[name] - before[name]).flatten() for name in gradient]))
        assert all(torch.equal(rates[name], rate) for name, rate in method.rates.items())
    torch.testing.assert_close(steps[1], steps[0] / 2)


def test_patience_without_validation_data_is_rejected_before_learning() -> None:
    learner = Learner(Small(), Finetune())
    before = learner.network.snapshot()
    with pytest.raises(DataError, match=r"task 0: .*needs validation data.*patience=0"):
        learner.learn(task(0, val=False), patience=2)
    assert learner.num_tasks == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.network.snapshot().items())


def test_non_finite_validation_loss_stops_the_task() -> None:
    network = counting()
    validation = Validation(Paced(1.0), network, Scripted([math.nan], network), 10, TrainingConfig(patience=1))  # type: ignore[arg-type]
    with pytest.raises(DivergedError, match="validation loss of 'task 0' became nan"):
        validation.should_continue()


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("method", SEQUENTIAL)
def test_norm_layers_can_be_frozen_from_the_second_task_on(method: str, freeze: bool) -> None:
    """Scale and shift move in the first task, and later only unless frozen; running statistics always move."""
    torch.manual_seed(0)
    model = Small()
    learner = Learner(model, settings_of(method, "cifar100-superclass"))
    start = learner.network.snapshot()
    learner.learn(task(0), epochs=2, batch_size=6, freeze_norms=freeze)
    first = learner.network.snapshot()
    learner.learn(task(1), epochs=2, batch_size=6, freeze_norms=freeze)
    second = learner.network.snapshot()
    for name in ("norm.weight", "norm.bias"):
        assert not torch.equal(start[name], first[name])
        stays = freeze or method in ("gpm", "sgp")  # these methods freeze them by their own settings
        assert torch.equal(first[name], second[name]) is stays
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    assert not torch.equal(first["conv.weight"], second["conv.weight"])


@pytest.mark.parametrize("method", ["fs-dgpm", "gpm", "la-maml", "icarl"])
def test_later_tasks_can_use_the_running_statistics_of_the_first(method: str) -> None:
    """In training as in evaluation: a sample's output then does not depend on the rest of its batch."""
    learner = Learner(Small(), settings_of(method, "cifar100-superclass"))
    learner.learn(task(0), batch_size=6, freeze_statistics=True)
    first = learner.network.snapshot()
    learner.learn(task(1), batch_size=6, freeze_statistics=True)
    second = learner.network.snapshot()
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(first[name], second[name])
    assert not torch.equal(first["conv.weight"], second["conv.weight"])
    x, _ = images(6, range(2), 3)
    with learner.network.mode(training=True):
        assert learner.model.training
        torch.testing.assert_close(learner.model(x)[:2], learner.model(x[:2]))


@pytest.mark.parametrize("method", [FSDGPM(second_order=True, buffer=10), LaMAML(second_order=True, buffer=10)])
def test_norm_layers_stay_frozen_in_second_order(method: MethodConfig) -> None:
    learner = Learner(Small(), method)
    learner.learn(task(0), batch_size=6)
    before = learner.network.snapshot()
    learner.learn(task(1), batch_size=6, freeze_norms=True)
    after = learner.network.snapshot()
    assert torch.equal(before["norm.weight"], after["norm.weight"])
    assert not torch.equal(before["conv.weight"], after["conv.weight"])


@pytest.mark.parametrize("method", ["finetune", "gpm"])
def test_task_changes_only_its_own_outputs(method: str) -> None:
    """Without replay, the other tasks' outputs do not change, bit for bit."""
    learner = Learner(Small(), settings_of(method, "cifar100-split"))
    learner.learn(task(0), batch_size=6)
    before = learner.network.snapshot()["head.weight"]
    learner.learn(task(1), batch_size=6)
    after = learner.network.snapshot()["head.weight"]
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2:], after[2:])


def test_augmentation_applies_to_training_and_replay_but_not_to_evaluation() -> None:
    """Every training batch is augmented with the run's generator; replay stores the variants."""
    calls: list[int] = []

    def darker(x: Tensor, generator: torch.Generator) -> Tensor:
        calls.append(len(x))
        return x * torch.rand((), generator=generator)

    rows = range(2)
    train = images(24, rows, 0)
    given_task = Task(train, images(10, rows, 1), val=images(9, rows, 2), head=rows, augment=darker)
    learner = Learner(Small(), ER(buffer=50))
    learner.learn(given_task, epochs=2, batch_size=6, patience=1)
    assert calls == [6] * 8
    method: Any = learner.validate(given_task)
    stored = method.replay.sample(50).x
    assert not any((sample == train[0]).flatten(1).all(1).any() for sample in stored)
    learner.evaluate(given_task)
    assert calls == [6] * 8
    again = Learner(Small(), ER(buffer=50))
    again.learn(given_task, epochs=2, batch_size=6, patience=1)
    other: Any = again.validate(given_task)
    assert torch.equal(other.replay.sample(50).x, stored)


def test_jointly_learned_tasks_use_their_own_augmentation() -> None:
    seen = {0: 0, 1: 0}

    def note(number: int) -> Any:
        def augment(x: Tensor, generator: torch.Generator) -> Tensor:
            seen[number] += len(x)
            return x

        return augment

    tasks = [Task(images(12, range(2 * n, 2 * n + 2), n), head=range(2 * n, 2 * n + 2), augment=note(n)) for n in seen]
    Learner(Small(), Finetune()).learn(tasks, batch_size=5)
    assert seen == {0: 12, 1: 12}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_method_has_a_preset_for_every_benchmark_of_the_paper(benchmark: str) -> None:
    without = {name for name, entry in METHODS.items() if benchmark not in entry.presets}
    assert without == ({"icarl"} if benchmark.startswith("pmnist") else set())


@pytest.mark.parametrize(
    ("benchmark", "method"),
    [
        *(("cifar100-superclass", method) for method in METHODS),
        *(("tiny-imagenet", method) for method in METHODS if method not in ("fs-gpm", "dgpm", "la-dgpm", "oracle")),
        *(("cifar100-split", method) for method in ("fs-dgpm", "la-maml", "gem", "gpm", "ewc", "icarl")),
    ],
)
def test_presets_run(benchmark: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short tasks through the real network and the full protocol; the final weights are finite."""
    monkeypatch.setattr(cifar100, "load", lambda: synthetic(each=27))
    monkeypatch.setattr(tiny_imagenet, "load", lambda: synthetic(10, (3, 64, 64), each=51))
    config, made = RunConfig.make(benchmark, method, ["epochs=1", "benchmark.tasks=2"]), []
    first_made = experiment._build_learner
    monkeypatch.setattr(experiment, "_build_learner", lambda config: made.append(first_made(config)) or made[-1])
    result = run(config)
    assert result.updates > 0
    assert result.is_canonical is False
    start, ended = (learner.network.snapshot() for learner in (first_made(config), made[-1]))
    assert all(bool(value.isfinite().all()) for value in ended.values())
    assert not all(torch.equal(value, ended[name]) for name, value in start.items())


def test_fewer_tasks_on_disk_are_not_canonical(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings are the benchmark's own; only the data on disk is incomplete."""
    monkeypatch.setattr(tiny_imagenet, "load", lambda: synthetic(10, (3, 64, 64), each=51))
    config = RunConfig.make("tiny-imagenet", "finetune")
    assert config.is_canonical
    result = run(config)
    assert result.is_canonical is False
    assert len(result.accuracy) == 2
    assert "2 tasks instead of 40" in result.remarks[0]


@settings(max_examples=10)
@given(st.integers(0, 3))
def test_fewer_tasks_are_a_prefix(seed: int) -> None:
    short, whole = (RunConfig.make("split-mnist", "er", [f"benchmark.tasks={n}", "samples=20"]) for n in (2, 5))
    for one, other in zip(short.benchmark_settings.stream(seed), whole.benchmark_settings.stream(seed), strict=False):
        assert torch.equal(next(one.train.batches(20, None))[0], next(other.train.batches(20, None))[0])
