"""A user's own folder of images, one sub-folder for each class.

PATH/train/CLASS/*  with  PATH/test/CLASS/*  (or val instead of test)
PATH/CLASS/*        alone: a share of each class becomes its test images
"""

from __future__ import annotations

import functools
import hashlib
import unicodedata
from pathlib import Path

import torch
from torch import Tensor

from steppe.data.archives import read_file
from steppe.data.decoding import decode
from steppe.data.images import ImageArrays, Part
from steppe.errors import DataError, UsageError, has_control_characters, short_repr

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm")
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM")
_LARGEST_FILE = 200_000_000  # bytes

Files = dict[str, list[Path]]


def load(path: Path, size: int, test_share: float = 0.2) -> ImageArrays:
    """The images under `path` as uint8 RGB, (n, 3, size, size).

    `size` 0 keeps them as they are; then all must be of one size. `test_share` is the part of each class that is held
    out where the folder has no test images of its own.
    """
    if size < 0:
        raise UsageError(f"size = {size}: give the side of the images in pixels, or 0 to keep them as they are.")
    if not path.is_dir():
        raise DataError(f"{path} is no directory: give one with a folder of images for each class.")
    files = _split(path, test_share)
    classes = sorted(files["train"])
    if len(classes) < 2:
        raise DataError(f"{path} has {len(classes)} folder(s) of images: give at least two classes.")
    train, test = (
        tuple((file, label, _version(file)) for label, name in enumerate(classes) for file in files[part][name])
        for part in ("train", "test")
    )
    return _read(path, size, tuple(classes), train, test)


FileList = tuple[tuple[Path, int, tuple[int, int]], ...]
"""Each image file with its label and its version."""


@functools.lru_cache(maxsize=1)  # a benchmark asks for its images again and again; the versions tell when they change
def _read(path: Path, size: int, classes: tuple[str, ...], train: FileList, test: FileList) -> ImageArrays:
    parts = _arrays(train, size), _arrays(test, size)
    if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
        raise DataError(f"the training and test images of {path} differ in size: give a size to scale them to.")
    return ImageArrays(*parts, classes, str(path))


def _version(file: Path) -> tuple[int, int]:
    """When a file was changed and its size; a link that leads nowhere is found out when it is read."""
    if not file.exists():
        return 0, 0
    status = file.stat()
    return status.st_mtime_ns, status.st_size


def _split(path: Path, test_share: float) -> dict[Part, Files]:
    train, tests = path / "train", [path / name for name in ("test", "val") if (path / name).is_dir()]
    if train.is_dir() != bool(tests):
        there, lacking = ("train", "test (or val)") if train.is_dir() else (tests[0].name, "train")
        raise DataError(f"{path} has a folder {there} but none called {lacking}: give both, or only classes.")
    if tests:
        own: dict[Part, Files] = {"train": _classes(train), "test": _classes(tests[0])}
        for one, other in ((train, tests[0]), (tests[0], train)):
            for name in sorted(_classes(one).keys() - _classes(other).keys()):
                raise DataError(f"class {name!r} is in {one} but not in {other}: give images of it in both.")
        return own
    if not 0 < test_share < 1:
        raise UsageError(f"test_share = {test_share}: give the part of the images to test on, between 0 and 1.")
    files: dict[Part, Files] = {"train": {}, "test": {}}
    for name, images in _classes(path).items():
        if len(images) < 2:
            raise DataError(f"class {name!r} has {len(images)} image(s): give at least two, one of them to test on.")
        places = sorted(images, key=lambda image: _hash_position(f"{name}/{image.name}"))
        held_out = [image for image in places if _hash_position(f"{name}/{image.name}") < test_share]
        held_out = held_out[: len(images) - 1] or places[:1]  # something to test on, and something to learn from
        files["test"][name] = sorted(held_out)
        files["train"][name] = sorted(set(images) - set(held_out))
    return files


def _hash_position(name: str) -> float:
    """A file's place between 0 and 1, from its name alone, so that it stays where it is when others are added; a name
    that is not UTF-8 serves as the bytes that it is.
    """
    digest = hashlib.sha256(unicodedata.normalize("NFC", name).encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _classes(path: Path) -> Files:
    """The image files of each folder in `path`, sorted; hidden ones are passed over."""
    files = {}
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            if has_control_characters(folder.name):  # tasks are called after their classes, in logs and states
                told = "is not UTF-8, or holds control characters"
                raise DataError(f"the folder {short_repr(folder.name)} in {path} has a name that {told}: rename it.")
            files[folder.name] = sorted(
                file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
            )
            if not files[folder.name]:
                raise DataError(f"{folder} holds no image ({', '.join(SUFFIXES)}): add some, or remove the folder.")
    return files


def _arrays(listed: FileList, size: int) -> tuple[Tensor, Tensor]:
    images: Tensor | None = None
    for place, (file, _, _) in enumerate(listed):
        image = decode(read_file(file, _LARGEST_FILE), str(file), _FORMATS, resize=size)
        if images is None:
            images = torch.empty((len(listed), *image.shape), dtype=torch.uint8, device="cpu")
        if image.shape != images.shape[1:]:
            raise DataError(
                f"{file} is of {image.shape[2]} × {image.shape[1]} pixels, {listed[0][0]} of {images.shape[3]} × "
                f"{images.shape[2]}: give a size to scale them to."
            )
        images[place] = image
    assert images is not None  # no class is empty
    return images, torch.tensor([label for _, label, _ in listed], device="cpu")
