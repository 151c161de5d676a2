"""A benchmark small enough to run hundreds of times, with everything that must survive an interruption: BatchNorm,
dropout, augmentation, heads, validation, learning-rate decay. Tests register it as `pictures`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import steppe
from steppe.registry import BENCHMARKS
from steppe.runtime.rng import Streams


class PictureNet(nn.Module):
    """Convolution, BatchNorm, dropout, two linear layers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2)
        self.hidden, self.head = nn.Linear(64, 12), nn.Linear(12, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of byte images."""
        x = self.drop(self.norm(self.conv(x)).relu()).flatten(1)
        output: Tensor = self.head(self.hidden(x).relu())
        return output


def mirrored(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image, or its mirror image."""
    flip = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)


@dataclass(frozen=True)
class Pictures(steppe.Benchmark):
    """Settings of the benchmark."""

    training = steppe.TrainingConfig(
        epochs=4, batch_size=8, updates_per_batch=2, patience=1, lr_min=1e-4, freeze_norms=True
    )

    tasks: int = steppe.setting(3, "number of tasks", at_least=1)
    samples: int = steppe.setting(24, "training samples of each task", at_least=8)

    def stream(self, seed: int) -> Sequence[steppe.Task]:
        """Tasks of random images; those of one class are bright in the same positions."""
        generator = torch.Generator().manual_seed(Streams(seed).derive_seed("pictures"))
        return [self._task(number, generator) for number in range(self.tasks)]

    def _task(self, number: int, generator: torch.Generator) -> steppe.Task:
        head = range(2 * number, 2 * number + 2)
        bright = torch.randint(0, 120, (2, 1, 6, 6), generator=generator)

        def pictures(count: int) -> tuple[Tensor, Tensor]:
            y = torch.arange(count) % 2
            x = bright[y] + torch.randint(0, 136, (count, 1, 6, 6), generator=generator)
            return x.to(torch.uint8), y + head.start

        return steppe.Task(
            pictures(self.samples),
            pictures(20),
            val=pictures(10),
            head=head,
            augment=mirrored,
            name=f"pictures {number + 1}",
        )

    def network(self) -> nn.Module:
        """A new network."""
        return PictureNet(2 * self.tasks)


def register() -> None:
    """Register the benchmark."""
    steppe.register_benchmark("pictures", "Random pictures of six by six, two classes to a task.")(Pictures)


@contextmanager
def registered() -> Iterator[None]:
    """Register the benchmark inside."""
    register()
    try:
        yield
    finally:
        del BENCHMARKS["pictures"]
