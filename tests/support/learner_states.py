"""Comparing two learners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steppe import Batch, Learner


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: Learner, other: Learner) -> bool:
    first, second = weights(one.model), weights(other.model)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def same_state(one: Any, other: Any) -> bool:
    """Whether two states hold the same values, bit for bit; NaN is the same as NaN."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    if isinstance(one, Batch):
        return all(same_state(getattr(one, part), getattr(other, part)) for part in ("x", "y", "task"))
    return bool(one == other)


def timeless(learner: Learner) -> Any:
    """A learner's state without the progress of a task, which holds times."""
    return {key: value for key, value in learner.state_dict().items() if key != "fitting"}
