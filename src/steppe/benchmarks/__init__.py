"""The benchmarks, one file each; importing this package makes them known by name."""

from steppe.benchmarks.pmnist import PMNIST

__all__ = ["PMNIST"]
