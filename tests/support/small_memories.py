"""A small model with a memory, for tests of own loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import steppe


def small(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 3)).to(dtype)


def with_memory(model: nn.Module, **settings: Any) -> steppe.GradientProjectionMemory:
    """A memory of four inputs."""
    memory = steppe.GradientProjectionMemory(model, **{"threshold": 1.0, **settings})
    first = next(model.parameters())
    memory.update(torch.randn(4, 10, dtype=first.dtype))
    return memory


def backward(model: nn.Module, count: int = 8) -> Tensor:
    first = next(model.parameters())
    loss = model(torch.randn(count, 10, dtype=first.dtype)).square().sum()
    loss.backward()
    return loss


def share_inside(memory: steppe.GradientProjectionMemory, before: dict[str, Tensor]) -> float:
    """The share of the covered weights' movement that lies in the span of the memory's bases."""
    now = dict(memory.model.named_parameters())
    inside = whole = 0.0
    for name, projector in memory.projectors.items():
        moved = (now[name].detach() - before[name]).double()
        inside += float((moved @ projector.basis[0].double()).square().sum())
        whole += float(moved.square().sum())
    return (inside / whole) ** 0.5


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
