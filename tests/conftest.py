"""Shared by all tests: one thread, so that results do not depend on the machine, and one hypothesis profile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pictures
import pytest
import torch
from hypothesis import settings
from local_server import server  # noqa: F401
from real_data import cifar100_data, cifar100_directory, tiny_imagenet_data, tiny_imagenet_directory  # noqa: F401
from small_cifar100 import small_cifar100  # noqa: F401

from steppe.fast.switch import fast_paths

torch.set_num_threads(1)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when scipy is loaded, later
settings.register_profile("steppe", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("steppe")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The global generator has the same seed at the start of every test."""
    torch.manual_seed(20)


@pytest.fixture
def fast_paths_on() -> Iterator[None]:
    """For tests of a fast path itself: enable it even if the suite runs with STEPPE_FAST=0."""
    with fast_paths(True):
        yield


@pytest.fixture(scope="module")
def pictures_known() -> Iterator[None]:
    """Register the benchmark `pictures` for the tests of one module."""
    with pictures.registered():
        yield
