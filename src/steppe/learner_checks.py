"""What a learner is given, refused where it cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from steppe.curriculum import Curriculum
from steppe.errors import DataError, ModelError, UsageError, shown
from steppe.methods.base import MethodSettings
from steppe.protocol import Training
from steppe.state import State
from steppe.task import Task


def check_given(
    model: object, method: object, seed: object, device: object, prepare: object, exclude: Sequence[str]
) -> None:
    """Refuse arguments of another kind than a learner is made of."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}: give a torch.nn.Module.")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ModelError(
                f"the layer {name!r} has sparse gradients, which methods cannot use: give it sparse=False."
            )
    if not isinstance(method, MethodSettings):
        raise UsageError(f"method is {shown(method)}: give a method's settings, such as steppe.FSDGPM().")
    if type(seed) is not int:
        raise UsageError(f"seed = {shown(seed)}: give a whole number.")
    if prepare is not None and not callable(prepare):
        raise UsageError(f"prepare is {shown(prepare)}: give a function from stored inputs to the model's.")
    if not isinstance(exclude, (list, tuple)):
        raise UsageError(f"exclude is {shown(exclude)}: give a list of names, such as ['head'].")
    check_device(device)


def has_extra_state(model: nn.Module) -> bool:
    """Whether it has a state beside weights and buffers, so that a file could hold only a part of it."""
    return any(type(module).get_extra_state is not nn.Module.get_extra_state for module in model.modules())


def check_device(device: object) -> None:
    """Refuse a device that is not known or not there; None is the model's own."""
    try:
        kind = None if device is None else torch.device(device).type  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {shown(device)} is unknown: give 'cpu' or 'cuda'.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device}: this machine or this build of torch has no CUDA; use 'cpu'.")


def check_same(interrupted: State, curriculum: Curriculum, training: Training) -> None:
    """Refuse to go on with another task, or in another way, than the one that broke off."""
    if interrupted["task"] != curriculum.name or interrupted["training"] != training.as_dict():
        raise UsageError(
            f"the learner was saved in the middle of {interrupted['task']!r}, learnt with {interrupted['training']}: "
            f"give it that again, before anything else (this is {curriculum.name!r} with {training.as_dict()})."
        )


def listed_tasks(tasks: Task | Sequence[Task]) -> list[Task]:
    """One task or several as a list; anything else is refused."""
    listed = list(tasks) if isinstance(tasks, Iterable) else [tasks]
    for task in listed:
        if not isinstance(task, Task):
            raise UsageError(
                f"a {type(task).__name__} is given as a task: make one with steppe.Task((inputs, labels), ...)."
            )
    if not listed:
        raise DataError("there is no task: give at least one.")
    return listed
