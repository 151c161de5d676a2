"""The benchmarks, one file each; importing this package registers them."""

from steppe.benchmarks.cifar100_split import CIFAR100Split
from steppe.benchmarks.cifar100_superclass import CIFAR100Superclass
from steppe.benchmarks.folder import ImageFolder
from steppe.benchmarks.pmnist import PMNIST, PMNIST60k
from steppe.benchmarks.rotated_mnist import RotatedMNIST
from steppe.benchmarks.split_mnist import SplitMNIST
from steppe.benchmarks.tiny_imagenet import TinyImageNet

__all__ = [
    "PMNIST",
    "CIFAR100Split",
    "CIFAR100Superclass",
    "ImageFolder",
    "PMNIST60k",
    "RotatedMNIST",
    "SplitMNIST",
    "TinyImageNet",
]
