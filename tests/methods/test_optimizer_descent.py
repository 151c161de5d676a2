"""Steps by an optimizer of the user's: equal to the same loop by hand, outside the memory, whole, saved and resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import (
    ANY_OPTIMIZER,
    OPTIMIZERS,
    SCHEDULERS,
    adamw,
    batches,
    equal,
    settings,
    weights,
)
from small_tasks import Small, images, task
from torch import nn

import steppe
from steppe import ER, Finetune, Learner, Task
from steppe.methods.parts.optimizer_descent import OptimizerDescent
from steppe.network.network import Network
from steppe.network.optimizer_choice import OptimizerChoice
from steppe.projection.importance import Ones
from steppe.projection.layers import projected_weights
from steppe.projection.memory import GradientMemory


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
