"""An optimizer of the user's between tasks, under patience and interrupts, and with a growing head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    SCHEDULERS,
    adamw,
    equal,
    settings,
    weights,
)
from small_tasks import Small, task
from torch import nn
from torch.optim import lr_scheduler

import steppe
from steppe import ER, FSDGPM, GPM, Finetune, Learner, UsageError
from steppe.methods.parts.optimizer_descent import OptimizerDescent
from steppe.network.network import Network
from steppe.network.optimizer_choice import OptimizerChoice


def test_state_starts_anew_or_carries_over() -> None:
    def second_task(keep: bool) -> nn.Module:
        torch.manual_seed(0)
        learner = Learner(Small(), Finetune(), optimizer=adamw, keep_optimizer_state=keep)
        learner.learn(task(0), batch_size=8)
        descent = learner._method.descent  # type: ignore[union-attr]
        moments = descent.state_dict()["kept"]  # type: ignore[union-attr]
        assert bool(moments) is keep
        if keep:
            assert float(moments["hidden.weight"]["step"]) == 3
        learner.learn(task(1), batch_size=8)
        return learner.model

    assert not equal(second_task(True), second_task(False))


def test_another_optimizer_months_later(tmp_path: Any) -> None:
    learner = Learner(Small(), FSDGPM(buffer=20, basis_samples=10), optimizer=adamw)
    learner.learn(task(0))
    learner.save(tmp_path / "learner")
    with pytest.raises(UsageError, match=r"saved with the optimizer AdamW.*pass optimizer="):
        steppe.load(tmp_path / "learner", Small())
    again = steppe.load(tmp_path / "learner", Small(), optimizer=OPTIMIZERS["sgd"])
    assert equal(learner.model, again.model)
    again.learn(task(1))
    assert again.num_tasks == 2
    plain = Learner(Small(), ER())
    plain.learn(task(0))
    plain.save(tmp_path / "plain")
    steppe.load(tmp_path / "plain", Small(), optimizer=adamw).learn(task(1))


def test_not_within_a_task(tmp_path: Any) -> None:
    learner = Learner(Small(), ER(), optimizer=adamw)
    learner.learn(task(0), callback=lambda event: learner.save(tmp_path / "learner"))
    for other in (OPTIMIZERS["sgd"], None):
        with pytest.raises(UsageError, match=r"learned with AdamW.*the same optimizer"):
            steppe.load(tmp_path / "learner", Small(), optimizer=other)
    with pytest.raises(UsageError, match="another optimizer or scheduler"):
        steppe.load(tmp_path / "learner", Small(), optimizer=adamw, scheduler=SCHEDULERS["cosine"])


def test_patience_divides_every_learning_rate() -> None:
    model = Small()
    descent = OptimizerDescent(
        Network(model),
        OptimizerChoice(
            lambda params: torch.optim.AdamW(
                [{"params": params[:2], "lr": 0.4}, {"params": params[2:], "lr": torch.tensor(0.2)}], lr=1.0
            )
        ),
    )
    assert descent.lr == pytest.approx(0.4)
    assert descent.decay_lr(2.0) == pytest.approx(0.2)
    assert descent.decay_lr(2.0) == pytest.approx(0.1)
    rates = [float(group["lr"]) for group in descent.state_dict()["running"]["param_groups"]]
    assert rates == pytest.approx([0.1, 0.05])
    descent.restart()
    assert descent.lr == pytest.approx(0.4)


def test_frozen_weights_do_not_decay() -> None:
    torch.manual_seed(0)
    model = Small()
    learner = Learner(model, GPM(basis_samples=10), optimizer=adamw)
    learner.learn(task(0))
    before = weights(model)
    learner.learn(task(1))
    assert torch.equal(model.norm.weight, before["norm.weight"])
    assert not torch.equal(model.head.weight, before["head.weight"])


class StruckError(BaseException):
    """What another thread raises."""


class Splits(torch.optim.AdamW):
    """Is struck after it has moved half of its weights."""

    strikes = False

    def step(self, closure: Any = None) -> Any:
        if not Splits.strikes:
            return super().step(closure)
        group = self.param_groups[0]
        params = group["params"]
        group["params"] = params[:2]
        super().step(closure)
        group["params"] = params
        raise StruckError


def test_an_exception_within_a_step_leaves_the_weights_whole() -> None:
    torch.manual_seed(0)
    learner = Learner(
        Small(), ER(), optimizer=lambda params: Splits(params, lr=0.01), keep_optimizer_state=True, seed=1
    )
    learner.learn(task(0), batch_size=8)
    before = weights(learner.model)
    try:
        Splits.strikes = True
        with pytest.raises(StruckError):
            learner.learn(task(1), batch_size=8)
    finally:
        Splits.strikes = False
    assert all(torch.equal(p, before[name]) for name, p in weights(learner.model).items())
    assert learner.state_dict()["method"]["descent"]["kept"] == {}  # the split moments are gone
    learner.learn(task(0), batch_size=8)
    assert not torch.equal(learner.model.head.weight, before["head.weight"])  # type: ignore[union-attr,arg-type]


def foreign(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*params, nn.Parameter(torch.ones(7))])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"optimizer": foreign}, r"parameter of shape \(7,\) that is not one of the model's"),
        ({"optimizer": lambda params: None}, "must return a torch.optim.Optimizer, got None"),
        ({"optimizer": lambda params: torch.optim.AdamW(params, lr=-1)}, "`optimizer` failed: ValueError"),
        ({"optimizer": lambda params: torch.optim.LBFGS(params)}, "LBFGS.*needs a closure"),
        ({"optimizer": adamw, "scheduler": lambda optimizer: 3}, "must return a torch.optim.lr_scheduler"),
        (
            {"optimizer": adamw, "scheduler": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer)},
            r"patience=N",
        ),
    ],
)
def test_what_cannot_be_an_optimizer_is_said_before_work_starts(arguments: Any, match: str) -> None:
    learner = Learner(Small(), ER(), **arguments)
    before = weights(learner.model)
    with pytest.raises(UsageError, match=match):
        learner.learn(task(0))
    assert learner.num_tasks == 0
    assert all(torch.equal(p, before[name]) for name, p in weights(learner.model).items())


@pytest.mark.parametrize(
    ("method", "arguments", "match"),
    [
        (ER(), {"optimizer": torch.optim.AdamW}, "must be a function that makes one"),
        (ER(), {"optimizer": torch.optim.SGD([torch.ones(1)])}, "must be a function that makes one"),
        (ER(), {"scheduler": SCHEDULERS["cosine"]}, "scheduler needs an optimizer"),
        (ER(), {"keep_optimizer_state": True}, "keep_optimizer_state needs an optimizer"),
        (ER(), {"optimizer": adamw, "keep_optimizer_state": 1}, "must be True or False"),
        (steppe.LaMAML(), {"optimizer": adamw}, "LaMAML takes its own steps"),
    ],
)
def test_what_cannot_be_chosen(method: Any, arguments: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Learner(Small(), method, **arguments)


def test_patience_and_a_scheduler_do_not_mix() -> None:
    learner = Learner(Small(), ER(), optimizer=adamw, scheduler=SCHEDULERS["cosine"])
    with pytest.raises(UsageError, match="both patience and the scheduler"):
        learner.learn(task(0), patience=1)


def test_a_scheduler_that_ends_too_early_loses_nothing() -> None:
    learner = Learner(
        Small(),
        ER(),
        optimizer=adamw,
        scheduler=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4),
    )
    learner.learn(task(0), batch_size=8)
    with pytest.raises(UsageError, match="`scheduler` failed: ValueError: Tried to step"):
        learner.learn(task(1), epochs=2, batch_size=8)
    assert learner.num_tasks == 1
    learner.learn(task(1), batch_size=8)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("method", ["er", "fs-dgpm", "der++", "ewc"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_growing_head_keeps_its_state(method: str, optimizer: str, keep: bool, tmp_path: Any) -> None:
    """Within a segment of a stream, and resumed from a file to the same bits."""

    def new() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    own: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "keep_optimizer_state": keep}
    learner = Learner(new(), settings(method), head="2", grow=True, **own)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        batch = torch.randn(10, 8, generator=generator), torch.arange(10) % (2 + step)
        learner.observe(batch, update_every=30)
    descent = learner._method.descent.state_dict()  # type: ignore[union-attr]
    assert descent["running"] is not None
    for moments in descent["running"]["state"].values():
        if optimizer == "adamw":
            assert float(moments["step"]) >= 2  # also of the head, which grew in between
    learner.save(tmp_path / "learner")
    resumed = steppe.load(tmp_path / "learner", new(), **own)
    for each in (learner, resumed):
        each.observe(batch)
    assert equal(learner.model, resumed.model)
    assert learner.predict(batch[0]).shape == (10,)
