"""Rotated MNIST: in each task the digits are rotated a little further; single head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from steppe.benchmarks.image_benchmark import TaskSpec
from steppe.benchmarks.mnist_benchmark import MNISTBenchmark
from steppe.registry import register_benchmark
from steppe.settings import TrainingConfig, setting


@register_benchmark(
    "rotated-mnist", "Rotated MNIST: 20 tasks of 1,000 digits, each rotated 9 degrees further, one head."
)
@dataclass(frozen=True)
class RotatedMNIST(MNISTBenchmark):
    """Settings of Rotated MNIST."""

    training = TrainingConfig(epochs=1, batch_size=10, updates_per_batch=5)

    tasks: int = setting(20, "number of tasks", at_least=1, at_most=1000)
    degrees: float = setting(9.0, "angle by which each task is rotated beyond the previous one", above=0, at_most=360)
    samples: int = setting(1000, "training samples of each task", at_least=1, at_most=60_000)

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """One angle per task."""
        angles = [self.degrees * number for number in range(self.tasks)]
        return [TaskSpec(f"turned by {angle:g} degrees", view=rotate(angle)) for angle in angles]


def rotate(degrees: float) -> Callable[[Tensor], Tensor]:
    """A view that rotates flat digits, (n, 784), counterclockwise about the center, bilinearly, filling with black."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # From a position in the result to one in the image.
    back = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]], device="cpu")

    def view(images: Tensor) -> Tensor:
        pixels = images.reshape(-1, 1, 28, 28).float()
        grid = affine_grid(back.to(images.device).expand(len(images), 2, 3), list(pixels.shape), align_corners=False)
        return grid_sample(pixels, grid, align_corners=False).round().to(torch.uint8).flatten(1)

    return view
