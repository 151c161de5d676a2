"""Comparing two learners."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steppe import Learner


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: Learner, other: Learner) -> bool:
    first, second = weights(one.model), weights(other.model)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
