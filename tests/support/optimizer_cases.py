"""Optimizers, schedulers, and the methods that take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from small_tasks import SEQUENTIAL, Small, settings_of
from torch import Tensor, nn
from torch.optim import lr_scheduler

import steppe
from steppe import Finetune, Learner, Task
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
