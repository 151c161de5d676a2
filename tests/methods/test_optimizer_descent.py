"""Steps by an optimizer of the user's: equal to the same loop by hand, outside the memory, whole, saved and resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_tasks import SEQUENTIAL, Small, images, settings_of, task
from torch import Tensor, nn
from torch.optim import lr_scheduler

import steppe
from steppe import ER, FSDGPM, GPM, Finetune, Learner, Task, UsageError
from steppe.methods.parts.optimizer_descent import OptimizerDescent
from steppe.network.network import Network
from steppe.network.optimizer_choice import OptimizerChoice
from steppe.projection.importance import Ones
from steppe.projection.layers import projected_weights
from steppe.projection.memory import GradientMemory
from steppe.registry import METHODS

SMALLER = {"buffer": 20, "memory": 20, "exemplars": 20, "basis_samples": 10, "tasks": 4}
ANY_OPTIMIZER = [
    name
    for name in SEQUENTIAL
    if METHODS[name].settings.takes_any_optimizer  # type: ignore[attr-defined]
]
PROJECTING = [name for name in ANY_OPTIMIZER if METHODS[name].settings.uses_projection]  # type: ignore[attr-defined]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005, momentum=0.5, centered=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
}
adamw = OPTIMIZERS["adamw"]

SCHEDULERS: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=40),
    "multi step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
}


def settings(method: str) -> steppe.MethodConfig:
    made = settings_of(method, "")
    return made.replace(**{key: value for key, value in SMALLER.items() if key in made.as_dict()})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def batches(task: Task) -> list[tuple[Tensor, Tensor]]:
    """In the order that a learner with this seed shows them."""
    learner, seen = Learner(Small(), Finetune(), seed=3), []
    method = learner.validate(task)
    observe = method.observe

    def noted(batch: steppe.Batch) -> Tensor:
        seen.append((batch.x, batch.y))
        return observe(batch)

    method.observe = noted  # type: ignore[method-assign]
    learner.learn(task, epochs=2, batch_size=8)
    return seen


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*((optimizer, None) for optimizer in OPTIMIZERS), *((o, s) for o in ("adamw", "sgd") for s in SCHEDULERS)],
)
def test_the_same_as_a_loop_by_hand(optimizer: str, scheduler: str | None) -> None:
    """Bit for bit, with groups of the user's, a frozen weight, and a fresh optimizer for every task."""
    schedule = SCHEDULERS[scheduler] if scheduler else None

    def model() -> Small:
        torch.manual_seed(0)
        made = Small().double()
        made.norm.bias.requires_grad_(False)
        return made

    def grouped(model: Small, params: Any) -> list[dict[str, Any]]:
        head = {id(p) for p in model.head.parameters()}
        return [
            {"params": list(model.head.parameters()), "lr": 0.02},
            {"params": [p for p in params if id(p) not in head]},
        ]

    own, hand = model(), model()
    learner = Learner(
        own,
        Finetune(clip=0.0),
        seed=3,
        optimizer=lambda params: OPTIMIZERS[optimizer](grouped(own, params)),
        scheduler=schedule,
    )
    x, y = images(24, range(4), 5)
    tasks = [Task((x, y)), Task((x + 1, y))]
    learner.learn(tasks[0], epochs=2, batch_size=8)
    by_hand = OPTIMIZERS[optimizer](grouped(hand, [p for p in hand.parameters() if p.requires_grad]))
    steps = schedule(by_hand) if schedule else None
    for inputs, labels in batches(tasks[0]):
        by_hand.zero_grad()
        torch.nn.functional.cross_entropy(hand(inputs.double()), labels).backward()  # type: ignore[no-untyped-call]
        by_hand.step()
        if steps:
            steps.step()
    for name, p in weights(own).items():
        torch.testing.assert_close(p, weights(hand)[name], rtol=1e-9, atol=1e-12)
    learner.learn(tasks[1], epochs=1, batch_size=8)
    assert not equal(own, hand)
    assert all(p.grad is None for p in own.parameters())


@pytest.mark.parametrize("method", ANY_OPTIMIZER)
def test_sgd_of_torch_is_the_methods_own(method: str) -> None:
    """Where the importances λ move, an old momentum is weighed by the new λ."""
    found = []
    chosen = settings(method)
    momentum = {"momentum": 0.0} if chosen.as_dict().get("importance") == "sigmoid" else {}
    chosen = chosen.replace(**momentum)
    made = lambda params: torch.optim.SGD(params, lr=chosen.lr, momentum=chosen.momentum)  # type: ignore[attr-defined] # noqa: E731
    for optimizer in (None, made):
        torch.manual_seed(0)
        model = Small().double()
        learner = Learner(model, chosen, optimizer=optimizer)
        for number in range(2):
            learner.learn(task(number), epochs=3, batch_size=8, patience=1)
        found.append(weights(model))
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_projected_step_by_hand(optimizer: str) -> None:
    """AdamW and others on a quadratic, ½‖W − A‖², with half of the inputs' directions in the memory."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 3, bias=False).double()
    inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64) @ torch.randn(
        3, 6, generator=generator, dtype=torch.float64
    )
    network, memory = Network(model), GradientMemory(Ones(), projected_weights(model))
    memory.rebuild(network, inputs, threshold=1.0)
    outside = torch.eye(6, dtype=torch.float64) - inputs.pinverse() @ inputs
    descent = OptimizerDescent(network, OptimizerChoice(OPTIMIZERS[optimizer]))
    before, old = model(inputs).detach(), model.weight.detach().clone()
    by_hand = nn.Parameter(old.clone())
    reference = OPTIMIZERS[optimizer]([by_hand])
    for _ in range(20):
        descent.step({"weight": 0.5 * (model.weight.detach() - target)}, 2.0, outside=memory)
        start = by_hand.detach().clone()
        by_hand.grad = start - target
        reference.step()
        with torch.no_grad():
            by_hand.copy_(start + (by_hand - start) @ outside)
        torch.testing.assert_close(model.weight.detach(), by_hand.detach(), rtol=1e-7, atol=1e-9)
    assert float((model.weight.detach() - old).abs().max()) > 1e-3
    torch.testing.assert_close(model(inputs), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("method", ["gpm", "fs-gpm"])
def test_old_outputs_stay_on_a_whole_model(method: str, optimizer: str) -> None:
    """With λ = 1 no step lies within the bases; with all directions held, old inputs are answered as before."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(30, 40, bias=False), nn.ReLU(), nn.Linear(40, 40, bias=False), nn.ReLU(), nn.Linear(40, 4, bias=False)
    )
    held = {"thresholds": 1.0} if method == "gpm" else {"threshold": 1.0, "buffer": 12}
    chosen = settings(method).replace(basis_samples=12, **held)
    learner = Learner(model, chosen, optimizer=OPTIMIZERS[optimizer])
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 30, generator=generator), torch.arange(12) % 4
    learner.learn(Task((x, y)), epochs=3)
    before, old = learner.outputs(x), weights(model)
    held_in_second = dict(learner._method.memory.projectors)  # type: ignore[union-attr]
    learner.learn(Task((torch.randn(40, 30, generator=generator), torch.arange(40) % 4)), epochs=3)
    steps = {name: p - old[name] for name, p in weights(model).items()}
    assert set(held_in_second) == set(steps)
    for name, step in steps.items():
        assert float(step.norm() / old[name].norm()) > 1e-3
        assert float((step @ held_in_second[name].columns).norm() / step.norm()) < 1e-5
    if method == "fs-gpm":  # GPM leaves out the direction that reaches the threshold in its first task
        torch.testing.assert_close(learner.outputs(x), before, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("method", ANY_OPTIMIZER)
@pytest.mark.parametrize("keep", [False, True])
def test_a_task_resumes_to_the_same_bits(method: str, keep: bool, tmp_path: Any) -> None:
    """From a file saved within the second task, with the optimizer's and the scheduler's state."""
    arguments: dict[str, Any] = {
        "optimizer": adamw,
        "scheduler": SCHEDULERS["one cycle"],
        "keep_optimizer_state": keep,
    }

    def new() -> nn.Module:
        torch.manual_seed(0)
        return Small()

    whole = Learner(new(), settings(method), seed=1, **arguments)
    for number in range(2):
        whole.learn(task(number), epochs=3, batch_size=8)
    stopped = Learner(new(), settings(method), seed=1, **arguments)
    stopped.learn(task(0), epochs=3, batch_size=8)

    def save(event: object) -> None:
        if isinstance(event, steppe.EpochEnded) and event.epoch == 1:
            stopped.save(tmp_path / "learner")

    stopped.learn(task(1), epochs=3, batch_size=8, callback=save)
    resumed = steppe.load(tmp_path / "learner", Small(), **arguments)
    resumed.learn(task(1), epochs=3, batch_size=8)
    assert equal(whole.model, stopped.model)
    assert equal(whole.model, resumed.model)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*((optimizer, "multi step") for optimizer in OPTIMIZERS), *(("adamw", scheduler) for scheduler in SCHEDULERS)],
)
def test_every_state_survives_a_file(optimizer: str, scheduler: str, tmp_path: Any) -> None:
    arguments: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "scheduler": SCHEDULERS[scheduler]}
    torch.manual_seed(0)
    learner = Learner(Small(), ER(buffer=10), **arguments)

    def save(event: object) -> None:
        if isinstance(event, steppe.EpochEnded) and event.epoch == 1:
            learner.save(tmp_path / "learner")

    learner.learn(task(0), epochs=3, batch_size=8, callback=save)
    resumed = steppe.load(tmp_path / "learner", Small(), **arguments)
    resumed.learn(task(0), epochs=3, batch_size=8)
    assert equal(learner.model, resumed.model)


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
