"""Two small tasks for tests of other libraries' loops, and a model whose old outputs are watched."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe

FEATURES, SAMPLES = 30, 12


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 40), nn.ReLU(), nn.LayerNorm(40), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    )


def task(number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The samples of a task, few enough that a basis of all of them leaves room to learn; alike in all precisions."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return x.to(dtype), torch.randint(3, (SAMPLES,), generator=generator)


def loader(number: int, dtype: torch.dtype = torch.float32) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*task(number, dtype)), batch_size=4, shuffle=True)


def exact_memory(model: nn.Module) -> steppe.GradientProjectionMemory:
    """One that holds the outputs on its samples entirely."""
    return steppe.GradientProjectionMemory(model, threshold=1.0, freeze_uncovered=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def largest_change(before: Tensor, after: Tensor) -> float:
    return float((after.detach() - before.detach()).abs().max())
