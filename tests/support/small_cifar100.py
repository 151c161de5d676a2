"""A CIFAR-100 of 300 random images, in the publisher's binary format."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import numpy as np
import pytest

from steppe.data import cifar100


def small_set(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and their labels, equally many of each class, in a random order."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 3072), np.uint8), generator.permutation(np.arange(count) % 100)


def binary(images: np.ndarray, fine: np.ndarray) -> bytes:
    return b"".join(bytes((cifar100.COARSE[k], k)) + x.tobytes() for x, k in zip(images, fine.tolist(), strict=True))


def write_folder(directory: Path, parts: dict[str, bytes]) -> Path:
    folder = directory / cifar100.NAME
    folder.mkdir()
    for part, content in parts.items():
        (folder / f"{part}.bin").write_bytes(content)
    return folder


def pack(folder: Path) -> Path:
    """Pack the folder into the archive that unpacks to it, and remove the folder."""
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz", compresslevel=0) as packed:
        packed.add(folder, folder.name)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return archive


PARTS = {"train": small_set(200, 0), "test": small_set(100, 1)}


@pytest.fixture
def small_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory, and a CIFAR-100 of 300 random images that passes for the real one."""
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    cifar100._load.cache_clear()
    for part, (images, fine) in PARTS.items():
        monkeypatch.setitem(cifar100.IMAGES, part, len(fine))
        keys = sorted(bytes((k,)) + hashlib.sha256(x).digest() for x, k in zip(images, fine.tolist(), strict=True))
        monkeypatch.setitem(cifar100.FINGERPRINTS, part, hashlib.sha256(b"".join(keys)).hexdigest())
    return tmp_path
