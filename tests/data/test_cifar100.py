"""CIFAR-100: the same result from every source, and an error for every damaged one."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from small_cifar100 import PARTS, binary, pack, write_folder

from steppe.data import cifar100
from steppe.errors import DataError


def loaded() -> list[torch.Tensor]:
    cifar100._load.cache_clear()
    images = cifar100.load()
    return [*images.select("train"), *images.select("test")]


def test_every_source_gives_the_same_images(small_cifar100: Path) -> None:
    """Folder and archive, and files in another order."""
    shuffled = {name: (images[::-1], fine[::-1]) for name, (images, fine) in PARTS.items()}
    results = []
    for source in (PARTS, shuffled):
        folder = write_folder(small_cifar100, {name: binary(*part) for name, part in source.items()})
        results.append(loaded())
        archive = pack(folder)
        results.append(loaded())
        archive.unlink()
    assert len(results) == 4
    for result in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0], strict=True))


def test_the_order_is_by_class_and_then_by_hash(small_cifar100: Path) -> None:
    write_folder(small_cifar100, {name: binary(*part) for name, part in PARTS.items()})
    x, y, *_ = loaded()
    images, fine = PARTS["train"]
    order = sorted(range(200), key=lambda i: (fine[i], hashlib.sha256(images[i].tobytes()).hexdigest()))
    assert x.dtype == torch.uint8
    assert y.dtype == torch.int64
    assert torch.equal(x.flatten(1), torch.from_numpy(images[order]))
    assert torch.equal(y, torch.from_numpy(fine[order]))


def test_planes_are_red_green_blue(small_cifar100: Path) -> None:
    write_folder(small_cifar100, {name: binary(*part) for name, part in PARTS.items()})
    x, *_ = loaded()
    flat = x.flatten(1)
    for channel, row, column in ((0, 0, 0), (0, 31, 31), (1, 0, 5), (2, 3, 0)):
        assert torch.equal(x[:, channel, row, column], flat[:, 1024 * channel + 32 * row + column])


def test_images_are_read_once(small_cifar100: Path) -> None:
    write_folder(small_cifar100, {name: binary(*part) for name, part in PARTS.items()})
    assert cifar100.load() is cifar100.load()


def relabelled(images: np.ndarray, fine: np.ndarray) -> bytes:
    other = fine.copy()
    other[fine == 3] = 4
    return binary(images, other)


def swapped(images: np.ndarray, fine: np.ndarray) -> bytes:
    """The counts are right, but two images have each other's label."""
    other = fine.copy()
    one, two = np.flatnonzero(fine == 3)[0], np.flatnonzero(fine == 4)[0]
    other[one], other[two] = 4, 3
    return binary(images, other)


def changed(images: np.ndarray, fine: np.ndarray) -> bytes:
    raw = bytearray(binary(images, fine))
    raw[2000] ^= 1
    return bytes(raw)


def recoarsed(images: np.ndarray, fine: np.ndarray) -> bytes:
    raw = bytearray(binary(images, fine))
    raw[0] = (raw[0] + 1) % 20
    return bytes(raw)


DAMAGED: dict[str, tuple[Callable[[np.ndarray, np.ndarray], bytes], str]] = {
    "empty": (lambda images, fine: b"", "has 0 images, expected 200"),
    "half a record": (lambda images, fine: binary(images, fine)[:-1000], "not a multiple of 3,074"),
    "fewer images": (lambda images, fine: binary(images[:-1], fine[:-1]), "has 199 images, expected 200"),
    "more images": (lambda images, fine: binary(images, fine) * 2, "larger than"),
    "label out of range": (
        lambda images, fine: binary(images, fine)[:-3073] + b"\xff" + binary(images, fine)[-3072:],
        "2 images of each of 100 classes",
    ),
    "another number of a class": (relabelled, "2 images of each of 100 classes"),
    "another superclass": (recoarsed, "a class with the wrong superclass"),
    "one bit": (changed, "is damaged: its hash"),
    "two labels swapped": (swapped, "is damaged: its hash"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_named(case: str, small_cifar100: Path) -> None:
    damage, message = DAMAGED[case]
    write_folder(small_cifar100, {"train": damage(*PARTS["train"]), "test": binary(*PARTS["test"])})
    with pytest.raises(DataError, match=f"train.bin .*{message}"):
        cifar100.load()


@pytest.mark.parametrize("name", ["cifar-100-python", "cifar-100-python.tar.gz"])
def test_python_version_is_rejected(name: str, small_cifar100: Path) -> None:
    (small_cifar100 / name).mkdir()
    with pytest.raises(
        DataError,
        match=rf"{name} is the Python version .* steppe reads the binary one: run `steppe data fetch cifar-100`",
    ):
        cifar100.load()
    write_folder(small_cifar100, {name: binary(*part) for name, part in PARTS.items()})
    assert len(cifar100.load().select("train")[1]) == 200


def test_incomplete_folder_is_rejected(small_cifar100: Path) -> None:
    write_folder(small_cifar100, {"train": binary(*PARTS["train"])})
    with pytest.raises(DataError, match=r"test\.bin is missing"):
        cifar100.load()


def archive_of(small_cifar100: Path) -> Path:
    return pack(write_folder(small_cifar100, {name: binary(*part) for name, part in PARTS.items()}))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_archive_is_rejected(share: float, small_cifar100: Path) -> None:
    archive = archive_of(small_cifar100)
    raw = archive.read_bytes()
    archive.write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(DataError, match=r"cifar-100-binary\.tar\.gz .*damaged or incomplete"):
        cifar100.load()


def test_corrupted_archive_is_rejected(small_cifar100: Path) -> None:
    archive = archive_of(small_cifar100)
    raw = bytearray(archive.read_bytes())
    raw[len(raw) // 2] ^= 4
    archive.write_bytes(raw)
    with pytest.raises(DataError, match=r"cifar-100-binary\.tar\.gz"):
        cifar100.load()


def tar_with(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(path, "w:gz") as packed:
        for member, content in members:
            packed.addfile(member, io.BytesIO(content))


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, "/etc/passwd"
    return info


def test_malicious_archives_are_rejected_while_reading(small_cifar100: Path) -> None:
    archive = small_cifar100 / "cifar-100-binary.tar.gz"
    tar_with(archive, (member("cifar-100-binary/train.bin", 0, tarfile.SYMTYPE), b""))
    with pytest.raises(DataError, match="not a regular file"):
        cifar100.load()
    tar_with(archive, (member("bomb", 20_000_000), bytes(20_000_000)))
    with pytest.raises(DataError, match="unpacks to more than"):
        cifar100.load()
    tar_with(archive, (member("cifar-100-binary/train.bin", 1_000_000), bytes(1_000_000)))
    with pytest.raises(DataError, match=r"train\.bin is larger than"):
        cifar100.load()
    tar_with(archive, (member("readme", 5), b"hello"))
    with pytest.raises(DataError, match="does not contain cifar-100-binary"):
        cifar100.load()


def test_missing_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    (tmp_path / "cifar-100-binary.tar.gz.part").write_bytes(b"half")
    with pytest.raises(DataError, match=r"CIFAR-100 is not in .*steppe data fetch cifar-100.*--data or STEPPE_DATA"):
        cifar100.load()


def test_superclasses() -> None:
    """The numbers of the classes as in the paper's benchmark."""
    assert [coarse.name for coarse in cifar100.SUPERCLASSES] == sorted(c.name for c in cifar100.SUPERCLASSES)
    assert cifar100.SUPERCLASSES[0] == ("aquatic_mammals", (4, 30, 55, 72, 95))
    assert cifar100.SUPERCLASSES[7].classes == (6, 7, 14, 18, 24)
    assert cifar100.SUPERCLASSES[19].classes == (41, 69, 81, 85, 89)
    assert sorted(fine for coarse in cifar100.SUPERCLASSES for fine in coarse.classes) == list(range(100))
    assert all(cifar100.COARSE[fine] == n for n, coarse in enumerate(cifar100.SUPERCLASSES) for fine in coarse.classes)


def test_scrambled_against_an_index_loop() -> None:
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    expected = torch.empty_like(images)
    for image, out in zip(images, expected, strict=True):
        flat = image.flatten()
        for c in range(3):
            for h in range(32):
                for w in range(32):
                    out[c, h, w] = flat[96 * h + 3 * w + c]
    scrambled = cifar100.scramble(images)
    assert scrambled.dtype == torch.uint8
    assert torch.equal(scrambled, expected)


def test_the_real_images(cifar100_data: Path) -> None:
    """Their known mean and standard deviation."""
    true = loaded()
    x, y = true[:2]
    assert x.shape == (50_000, 3, 32, 32)
    assert y.bincount().tolist() == [500] * 100
    assert true[3].bincount().tolist() == [100] * 100
    histogram = torch.stack([x[:, channel].flatten().bincount(minlength=256) for channel in range(3)]).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = histogram @ values / histogram.sum(1)
    spread = (histogram @ values**2 / histogram.sum(1) - mean**2).sqrt()
    assert mean.tolist() == pytest.approx([0.50707515923713, 0.48654887331495, 0.44091784336703], abs=1e-12)
    assert spread.tolist() == pytest.approx([0.26733428587924, 0.25643846291708, 0.27615047132568], abs=1e-12)
