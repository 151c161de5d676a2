"""TinyImageNet from its folder and its zip file: decoded class by class, with errors that name damaged files."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from steppe.data import tiny_imagenet
from steppe.errors import DataError

WNIDS = ["n01443537", "n00000001", "n02124075"]


def jpeg(seed: int, mode: str = "RGB", size: tuple[int, int] = (64, 64)) -> bytes:
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    raw = io.BytesIO()
    Image.fromarray(pixels).save(raw, "JPEG")
    return raw.getvalue()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TinyImageNet of three classes, each with three training and two test images."""
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    monkeypatch.setitem(tiny_imagenet.PER_CLASS, "train", 3)
    monkeypatch.setitem(tiny_imagenet.PER_CLASS, "test", 2)
    forget()
    top = tmp_path / "tiny-imagenet-200"
    (top / "val" / "images").mkdir(parents=True)
    lines = []
    for number, wnid in enumerate(WNIDS):
        images = top / "train" / wnid / "images"
        images.mkdir(parents=True)
        (images.parent / f"{wnid}_boxes.txt").write_text("boxes")
        for place in (0, 1, 10):
            (images / f"{wnid}_{place}.JPEG").write_bytes(jpeg(10 * number + place, "L" if place == 1 else "RGB"))
        for place in range(2):
            name = f"val_{3 * place + number}.JPEG"
            (top / "val" / "images" / name).write_bytes(jpeg(100 + 10 * number + place))
            lines.append(f"{name}\t{wnid}\t0\t0\t1\t1\n")
    (top / "val" / "val_annotations.txt").write_text("".join(lines))
    (top / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    return top


def forget() -> None:
    tiny_imagenet._load.cache_clear()
    tiny_imagenet._open_zip.cache_clear()


def loaded() -> tiny_imagenet.TinyImageNet:
    forget()
    return tiny_imagenet.load()


def pack(top: Path) -> Path:
    archive = top.with_name("tiny-imagenet-200.zip")
    with zipfile.ZipFile(archive, "w") as packed:
        for file in sorted(top.rglob("*")):
            packed.write(file, file.relative_to(top.parent))
    shutil.rmtree(top)
    return archive


def test_classes_are_sorted_and_decoded_on_demand(small: Path) -> None:
    images = loaded()
    assert images.classes == tuple(sorted(WNIDS))
    x, y = images.select("train", [2, 0])
    assert x.dtype == torch.uint8
    assert x.shape == (6, 3, 64, 64)
    assert y.tolist() == [2, 2, 2, 0, 0, 0]
    names = sorted((small / "train" / "n02124075" / "images").iterdir())
    for image, name in zip(x, names, strict=False):
        expected = np.array(Image.open(name).convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(image.numpy(), expected)
    test_x, test_y = images.select("test")
    assert test_x.shape == (6, 3, 64, 64)
    assert test_y.tolist() == [0, 0, 1, 1, 2, 2]
    first = np.array(Image.open(small / "val" / "images" / "val_1.JPEG")).transpose(2, 0, 1)
    assert np.array_equal(test_x[0].numpy(), first)


def test_grayscale_files_become_rgb(small: Path) -> None:
    x, _ = loaded().select("train", [0])
    grey = x[1]  # by name: _0, _1, _10
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], grey[2])


def test_zip_file_gives_the_same_images(small: Path) -> None:
    folder = loaded()
    expected = [*folder.select("train"), *folder.select("test")]
    pack(small)
    images = loaded()
    found = [*images.select("train"), *images.select("test")]
    assert images.classes == folder.classes
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_class_is_decoded_once_and_few_are_kept(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_imagenet, "_MAX_CACHED", 2)
    images = loaded()
    assert images._class("train", 0) is images._class("train", 0)
    for label in (0, 1, 2):
        images.select("train", [label])
    assert list(images._decoded) == [("train", 1), ("train", 2)]


def test_empty_folder(small: Path) -> None:
    x, y = loaded().select("train", [])
    assert (x.shape, y.shape) == ((0, 3, 64, 64), (0,))


def test_all_can_be_decoded(small: Path) -> None:
    told: list[tuple[int, int]] = []
    assert loaded().decode_all(lambda *pair: told.append(pair)) == 15
    assert told == [(15, 15)]


IMAGE = Path("train") / "n00000001" / "images" / "n00000001_1.JPEG"


def bomb() -> bytes:
    """A JPEG that declares 65,500 × 65,500 pixels."""
    raw = bytearray(jpeg(0))
    place = raw.index(b"\xff\xc0") + 5
    raw[place : place + 4] = struct.pack(">HH", 65_500, 65_500)
    return bytes(raw)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be decoded"),
        (jpeg(0)[:500], "cannot be decoded"),
        (b"GIF89a" + bytes(100), "cannot be decoded"),
        (jpeg(0, size=(64, 63)), "has 64 × 63 pixels, expected 64 × 64"),
        (bomb(), "65500|is too large"),
        (jpeg(0) + bytes(1_000_001), "larger than|unpacks to more than"),
    ],
)
def test_damaged_images_are_named(content: bytes, message: str, packed: bool, small: Path) -> None:
    (small / IMAGE).write_bytes(content)
    if packed:
        pack(small)
    images = loaded()
    images.select("train", [1])
    with pytest.raises(DataError, match=f"n00000001_1.JPEG.*({message})"):
        images.select("train", [0])
    with pytest.raises(DataError, match=r"n00000001_1\.JPEG"):
        images.decode_all(lambda done, total: None)


def test_incomplete_data_set_is_rejected(small: Path) -> None:
    (small / IMAGE).unlink()
    with pytest.raises(DataError, match=r"2 train images of class n00000001, expected 3.*steppe data fetch"):
        loaded()
    shutil.rmtree(small / "train" / "n00000001")
    with pytest.raises(DataError, match=r"images of 2 classes, but wnids\.txt lists 3"):
        loaded()
    (small / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01443537\n")
    with pytest.raises(DataError, match="has no class for"):
        loaded()
    (small / "val" / "val_annotations.txt").write_text("nonsense\n")
    with pytest.raises(DataError, match="a line without a file or its class"):
        loaded()
    (small / "val" / "val_annotations.txt").unlink()
    with pytest.raises(DataError, match=r"val_annotations\.txt is missing"):
        loaded()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_zip_is_rejected(share: float, small: Path) -> None:
    archive = pack(small)
    raw = archive.read_bytes()
    archive.write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(DataError, match=r"tiny-imagenet-200\.zip cannot be read"):
        loaded()


def test_corrupted_zip_is_rejected(small: Path) -> None:
    archive = pack(small)
    raw = bytearray(archive.read_bytes())
    raw[raw.index(b"\xff\xd8") + 1000] ^= 1  # within the first image
    archive.write_bytes(raw)
    with pytest.raises(DataError, match="Bad CRC"):
        loaded().decode_all(lambda done, total: None)


def test_missing_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    forget()
    with pytest.raises(DataError, match=r"TinyImageNet is not in .*steppe data fetch tiny-imagenet"):
        tiny_imagenet.load()


def test_the_real_images(tiny_imagenet_data: Path) -> None:
    images = loaded()
    assert len(images.classes) in (50, 200)
    assert images.classes[0] == "n01443537"
    x, y = images.select("train", [1])
    assert x.shape == (500, 3, 64, 64)
    assert y.unique().tolist() == [1]
    x, _ = images.select("test", [0, 2])
    assert x.shape == (100, 3, 64, 64)
    assert 0.2 < float(x.float().mean() / 255) < 0.7
    forget()
