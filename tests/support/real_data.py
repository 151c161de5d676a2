"""The real CIFAR-100 and TinyImageNet; tests that need them are skipped without them.

They come from the directory in STEPPE_DATA, or from a script `shared/data/unpack` beside the project, which writes them
in their publishers' layouts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "shared" / "data" / "unpack"
NAMED = os.environ.get("STEPPE_DATA")  # as it was when the tests began: tests change it


def directory_with(name: str, folder: str, factory: pytest.TempPathFactory) -> Path:
    if NAMED and (Path(NAMED) / folder).is_dir():
        return Path(NAMED)
    if not SCRIPT.exists():
        pytest.skip(f"needs the real {name}: fetch it with `steppe data fetch {name}` and set STEPPE_DATA")
    directory = factory.mktemp(name)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="session")
def cifar100_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_with("cifar-100", "cifar-100-binary", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_imagenet_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_with("tiny-imagenet", "tiny-imagenet-200", tmp_path_factory)


@pytest.fixture
def cifar100_data(cifar100_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-100 in the data directory."""
    monkeypatch.setenv("STEPPE_DATA", str(cifar100_directory))
    return cifar100_directory


@pytest.fixture
def tiny_imagenet_data(tiny_imagenet_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TinyImageNet, or some classes of it, in the data directory."""
    monkeypatch.setenv("STEPPE_DATA", str(tiny_imagenet_directory))
    return tiny_imagenet_directory
