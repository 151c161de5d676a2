"""What the benchmarks of handwritten digits share: MNIST's images, samples drawn by the seed, and the paper's MLP."""

from __future__ import annotations

from torch import nn

from steppe.benchmarks.image_benchmark import ImageBenchmark, Split, random_subset
from steppe.data import mnist
from steppe.data.images import ImageSet
from steppe.models.mlp import MLP


class MNISTBenchmark(ImageBenchmark):
    """A benchmark whose tasks are made of MNIST's digits."""

    samples: int
    """Training samples of each task: a setting, which each benchmark declares."""

    def images(self) -> ImageSet:
        """The digits."""
        return mnist.images()

    def split(self, seed: int) -> Split:
        """Samples drawn by the seed."""
        return random_subset(self.samples, seed)

    def network(self) -> nn.Module:
        """The paper's MLP, with ten outputs."""
        return MLP()
