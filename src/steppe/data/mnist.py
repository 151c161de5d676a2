"""MNIST, all 70,000 images, bundled (LeCun, Cortes, Burges; CC BY-SA 3.0)."""

from __future__ import annotations

import functools
import gzip
import hashlib
from importlib.resources import files
from typing import NamedTuple

from torch import Tensor

from steppe.data import idx
from steppe.data.images import ImageArrays
from steppe.errors import DataError

_SHA256 = {
    "train-images-idx3-ubyte.gz": "0b367032e93c5d0cea0925647cfdb18614af8ee15f83e6f2fc2ad904a6835971",
    "train-labels-idx1-ubyte.gz": "1787548bbe0bff1ec2ecdc0ef292b02df999e2d1a6002d27500982c652b17203",
    "t10k-images-idx3-ubyte.gz": "1a1a05eab793c14bb050b398624a11b0ffd1a2953baed553b1b9bd079e2a20be",
    "t10k-labels-idx1-ubyte.gz": "b91679a0acfe4ba0e50a2437a903084cba1f5f92592b016a25a7dfd00455798b",
}


class MNIST(NamedTuple):
    """Images as uint8, (n, 784), and labels as int64."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@functools.cache
def images() -> ImageArrays:
    """MNIST as a set of images, (n, 784)."""
    digits = load()
    train, test = (digits.train_x, digits.train_y), (digits.test_x, digits.test_y)
    return ImageArrays(train, test, [str(digit) for digit in range(10)], "MNIST")


@functools.cache
def load() -> MNIST:
    """Read and check the four bundled files, once per process.

    Returns:
        The images and labels.

    Raises:
        DataError: A file is missing or damaged.
    """
    train_x, train_y, test_x, test_y = (idx.parse_idx(_read_verified(name), name) for name in _SHA256)
    return MNIST(train_x.flatten(1), train_y.long(), test_x.flatten(1), test_y.long())


def _read_verified(name: str) -> bytes:
    try:
        packed = files("steppe.data").joinpath("mnist", name).read_bytes()
    except OSError as error:
        raise DataError(f"{name} is missing from the installed package; reinstall steppe.") from error
    if hashlib.sha256(packed).hexdigest() != _SHA256[name]:
        raise DataError(f"{name} of the installed package is damaged (wrong hash); reinstall steppe.")
    return gzip.decompress(packed)
