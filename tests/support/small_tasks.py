"""Small tasks and methods for tests of the training loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steppe import Task
from steppe.methods.base import MethodConfig
from steppe.registry import METHODS


class Small(nn.Module):
    """A convolution, BatchNorm, a linear layer and a head: all kinds of layers that matter here."""

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.hidden, self.head = nn.Linear(4, 8, bias=False), nn.Linear(8, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.hidden(self.norm(self.conv(x)).relu().mean((2, 3))).relu())
        return output


def images(count: int, head: range, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(head.start, head.stop, (count,), generator=generator)
    return torch.rand(count, 3, 6, 6, generator=generator) + y[:, None, None, None] * 0.3, y


def task(number: int, head: range | None = None, *, val: bool = True) -> Task:
    rows = head or range(2 * number, 2 * number + 2)
    return Task(
        images(24, rows, number),
        images(10, rows, 50 + number),
        val=images(9, rows, 90 + number) if val else None,
        head=rows,
        name=f"task {number}",
    )


def settings_of(method: str, benchmark: str) -> MethodConfig:
    entry = METHODS[method]
    made = entry.settings.from_mapping(entry.values(benchmark))
    assert isinstance(made, MethodConfig)
    return made


SEQUENTIAL = [name for name in METHODS if name not in ("multitask", "oracle")]
