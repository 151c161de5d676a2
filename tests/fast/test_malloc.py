"""Freed memory is kept: measured by the pages that the system has to provide."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from steppe.experiments import run as experiment
from steppe.experiments.config import RunConfig
from steppe.fast.malloc import keep_freed_memory

WISHES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
gnu_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
FAULTS = """
import resource, sys
import torch
from steppe.fast.malloc import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("cannot")
rounds, megabytes = 20, 48
for _ in range(10):  # small pieces left by the first ones lie between them until the allocator has enough of these
    torch.zeros(megabytes * 2**18)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(rounds):
    torch.zeros(megabytes * 2**18)
after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print((after - before) * resource.getpagesize() / rounds / 2**20)
"""


def cleared_megabytes(how: str) -> float:
    """How many megabytes the system has to provide for an array of 48 MiB that was just freed."""
    clean = {name: value for name, value in os.environ.items() if name not in WISHES}
    words = [sys.executable, "-c", FAULTS, how]
    done = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=120)
    if done.stderr.strip() == "cannot":
        pytest.skip("this library does not take the size")
    done.check_returncode()
    return float(done.stdout)


@gnu_only
def test_freed_memory_is_reused() -> None:
    if cleared_megabytes("leave") < 40:
        pytest.skip("this system hands pages out by larger pieces")
    assert cleared_megabytes("keep") < 1


@pytest.mark.parametrize("name", WISHES)
def test_user_configuration_is_respected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in WISHES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    called = []

    class Library:
        def __init__(self, name: None) -> None:
            self.mallopt = lambda option, value: called.append(option) or 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert keep_freed_memory()
    assert len(called) == 2
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()
    assert len(called) == 2


@pytest.mark.parametrize(("limit", "kept"), [(2**30, True), (2**25, True), (2**20, False)])
def test_older_libraries_accept_a_lower_limit(limit: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in WISHES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.31"))
    taken: dict[int, int] = {}

    class Library:
        def __init__(self, name: None) -> None: ...

        def mallopt(self, option: int, value: int) -> int:
            if option == -3 and value > limit:  # the size from which arrays are returned individually
                return 0
            taken[option] = value
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert keep_freed_memory() is kept
    assert taken == ({-3: limit, -1: 2**30} if kept else {})


@pytest.mark.parametrize("library", ["musl", ""])
def test_other_c_libraries_are_not_configured(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, ""))
    monkeypatch.delattr(ctypes, "CDLL")
    assert not keep_freed_memory()


def test_allocator_without_mallopt_is_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in WISHES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()


def test_runs_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(experiment, "keep_freed_memory", lambda: asked.append(True))
    changes = ["benchmark.tasks=1", "benchmark.samples=20", "benchmark.test_samples=20"]
    experiment.run(RunConfig.make("pmnist", "finetune", changes), None)
    assert asked
