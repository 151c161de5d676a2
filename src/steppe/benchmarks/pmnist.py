"""Permuted MNIST: in each task the 784 pixels are permuted differently; single head.

As in GEM, where the paper's data comes from, the permutations are drawn from a generator with seed 0, so that they are
the same in all runs, and the first task is permuted too. The run's seed draws the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steppe.benchmarks.image_benchmark import Split, TaskSpec, random_subset
from steppe.benchmarks.mnist_benchmark import MNISTBenchmark
from steppe.data.samples import PixelPermutation
from steppe.data.transforms import Normalize
from steppe.registry import register_benchmark
from steppe.settings import TrainingConfig, setting

_PERMUTATION_SEED = 0


@register_benchmark("pmnist", "Permuted MNIST: 20 tasks of 1,000 digits, each with its own pixel order, one head.")
@dataclass(frozen=True)
class PMNIST(MNISTBenchmark):
    """Settings of Permuted MNIST."""

    training = TrainingConfig(epochs=1, batch_size=10, updates_per_batch=5)

    tasks: int = setting(20, "number of tasks", at_least=1, at_most=1000)
    samples: int = setting(1000, "training samples of each task", at_least=1, at_most=60_000)
    test_samples: int = setting(10_000, "test samples of each task", at_least=1, at_most=10_000)

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """One permutation per task, the same for every seed."""
        shuffles = torch.Generator().manual_seed(_PERMUTATION_SEED)
        return [
            TaskSpec(
                f"permutation {number + 1}",
                view=PixelPermutation(torch.randperm(784, generator=shuffles, device="cpu")),
            )
            for number in range(self.tasks)
        ]

    def num_test_samples(self) -> int:
        """The first of the test samples."""
        return self.test_samples


@register_benchmark("pmnist-60k", "Permuted MNIST with all digits: 10 tasks of 60,000, for the loss-landscape study.")
@dataclass(frozen=True)
class PMNIST60k(PMNIST):
    """Settings of the landscape study's Permuted MNIST: all digits, standardized, a tenth for validation."""

    training = TrainingConfig(epochs=10, batch_size=10, patience=6)

    tasks: int = setting(10, "number of tasks", at_least=1, at_most=1000)
    samples: int = setting(60_000, "training and validation samples of each task", at_least=10, at_most=60_000)

    def split(self, seed: int) -> Split:
        """Samples drawn by the seed, a tenth of them for validation."""
        return random_subset(self.samples, seed, held_out=0.1)

    @property
    def input_transform(self) -> Normalize:
        """Standardized by MNIST's mean and standard deviation."""
        return Normalize((0.1307,), (0.3081,))
