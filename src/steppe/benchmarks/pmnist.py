"""Permuted MNIST: the same digits, every task through its own fixed shuffle of the 784 pixels; one head.

As in GEM, from which the paper's data comes: the permutations are successive draws from a generator seeded with 0, the
same in all runs, and the first task is permuted too; the run's seed picks the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from steppe.benchmarks.image_benchmark import ImageBenchmark, Split, TaskSpec, random_subset
from steppe.data import mnist
from steppe.data.images import ImageSet
from steppe.data.samples import PixelPermutation
from steppe.data.transforms import Normalize
from steppe.models.mlp import MLP
from steppe.registry import register_benchmark
from steppe.settings import TrainingConfig, setting

_PERMUTATION_SEED = 0


@register_benchmark("pmnist", "Permuted MNIST: 20 tasks of 1,000 digits, each with its own pixel order, one head.")
@dataclass(frozen=True)
class PMNIST(ImageBenchmark):
    """Settings of Permuted MNIST."""

    training = TrainingConfig(epochs=1, batch_size=10, updates_per_batch=5)

    tasks: int = setting(20, "number of tasks", at_least=1, at_most=1000)
    samples: int = setting(1000, "training samples of each task", at_least=1, at_most=60_000)
    test_samples: int = setting(10_000, "test samples of each task", at_least=1, at_most=10_000)

    def images(self) -> ImageSet:
        """The digits."""
        return mnist.images()

    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """One permutation after another, the same for every seed."""
        shuffles = torch.Generator().manual_seed(_PERMUTATION_SEED)
        return [
            TaskSpec(
                f"permutation {number + 1}",
                view=PixelPermutation(torch.randperm(784, generator=shuffles, device="cpu")),
            )
            for number in range(self.tasks)
        ]

    def split(self, seed: int) -> Split:
        """The seed's samples."""
        return random_subset(self.samples, seed)

    def num_test_samples(self) -> int:
        """The first of the test samples."""
        return self.test_samples

    def network(self) -> nn.Module:
        """The paper's MLP."""
        return MLP()


@register_benchmark("pmnist-60k", "Permuted MNIST at length: 10 tasks of 60,000 digits, for the loss-landscape study.")
@dataclass(frozen=True)
class PMNIST60k(PMNIST):
    """Settings of the landscape study's Permuted MNIST: all digits, standardised, a tenth of them to validate on."""

    training = TrainingConfig(epochs=10, batch_size=10, patience=6)

    tasks: int = setting(10, "number of tasks", at_least=1, at_most=1000)
    samples: int = setting(60_000, "training and validation samples of each task", at_least=10, at_most=60_000)

    def split(self, seed: int) -> Split:
        """The seed's samples, a tenth of them for validation."""
        return random_subset(self.samples, seed, held_out=0.1)

    @property
    def input_transform(self) -> Normalize:
        """Standardised by MNIST's mean and standard deviation."""
        return Normalize((0.1307,), (0.3081,))
