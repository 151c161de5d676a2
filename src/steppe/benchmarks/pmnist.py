"""Permuted MNIST: the same digits, every task through its own fixed shuffle of the 784 pixels; one head.

As in GEM, from which the paper's data comes: the permutations are successive draws from a generator seeded with 0, the
same in all runs, and the first task is permuted too; the run's seed picks the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steppe.benchmarks.base import Benchmark
from steppe.data import mnist
from steppe.data.samples import TensorSamples
from steppe.models.mlp import MLP
from steppe.protocol import Training
from steppe.registry import register_benchmark
from steppe.settings import setting
from steppe.task import Task

_PERMUTATION_SEED = 0
_TESTS_AT_HAND = 2**28  # bytes of test images that are reordered once and kept, rather than at every test


@register_benchmark("pmnist", "Permuted MNIST: 20 tasks of 1,000 digits, each with its own pixel order, one head.")
@dataclass(frozen=True)
class PMNIST(Benchmark):
    """Settings of Permuted MNIST."""

    training = Training(epochs=1, batch_size=10, glances=5)

    tasks: int = setting(20, "number of tasks", at_least=1, at_most=1000)
    samples: int = setting(1000, "training samples of each task", at_least=1, at_most=60_000)
    test_samples: int = setting(10_000, "test samples of each task", at_least=1, at_most=10_000)

    def stream(self, seed: int) -> Sequence[Task]:
        """The tasks, with the seed's samples."""
        digits = mnist.load()
        shuffles = torch.Generator().manual_seed(_PERMUTATION_SEED)
        choices = torch.Generator().manual_seed(seed)
        tasks = []
        for number in range(self.tasks):
            permutation = torch.randperm(digits.train_x.shape[1], generator=shuffles)
            chosen = torch.randperm(len(digits.train_x), generator=choices)[: self.samples]
            view = _reorder(permutation)
            test = TensorSamples(digits.test_x[: self.test_samples], digits.test_y[: self.test_samples], view)
            if self.tasks * test.x.nbytes <= _TESTS_AT_HAND:
                test = TensorSamples(view(test.x), test.y)
            tasks.append(
                Task(
                    TensorSamples(digits.train_x[chosen], digits.train_y[chosen], view),
                    test,
                    name=f"permutation {number + 1}",
                )
            )
        return tasks

    def network(self) -> nn.Module:
        """The paper's MLP."""
        return MLP()


def _reorder(permutation: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda images: images[:, permutation]
