"""A user's own folder of images, with one subfolder per class.

PATH/train/CLASS/*  with  PATH/test/CLASS/*  (or val instead of test)
PATH/CLASS/*        alone: a share of each class is held out for testing
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
    """Read the images of a folder.

    Args:
        path: The folder.
        size: The side in pixels to scale to; 0 keeps the size, which must then be the same for all.
        test_share: The fraction of each class to hold out for testing if there is no test folder.

    Returns:
        The images as uint8 RGB, (n, 3, size, size).

    Raises:
        DataError: The folder is missing or has too few classes or images, or an image cannot be read.
        UsageError: `size` or `test_share` is out of range.
    """
    if size < 0:
        raise UsageError(f"size = {size}: must be the side of the images in pixels, or 0 to keep their size.")
    if not path.is_dir():
        raise DataError(f"{path} is not a directory; pass one with a folder of images per class.")
    files = _split(path, test_share)
    classes = sorted(files["train"])
    if len(classes) < 2:
        raise DataError(f"{path} has {len(classes)} folder(s) of images; expected at least two classes.")
    train, test = (
        tuple((file, label, _version(file)) for label, name in enumerate(classes) for file in files[part][name])
        for part in ("train", "test")
    )
    return _read(path, size, tuple(classes), train, test)


FileList = tuple[tuple[Path, int, tuple[int, int]], ...]
"""Image files with their labels and versions."""


@functools.lru_cache(maxsize=1)  # benchmarks call this often; versions show changes
def _read(path: Path, size: int, classes: tuple[str, ...], train: FileList, test: FileList) -> ImageArrays:
    parts = _arrays(train, size), _arrays(test, size)
    if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
        raise DataError(f"the training and test images of {path} differ in size; set a size to scale them to.")
    return ImageArrays(*parts, classes, str(path))


def _version(file: Path) -> tuple[int, int]:
    """A file's modification time and size; a broken link raises an error when it is read."""
    if not file.exists():
        return 0, 0
    status = file.stat()
    return status.st_mtime_ns, status.st_size


def _split(path: Path, test_share: float) -> dict[Part, Files]:
    train, tests = path / "train", [path / name for name in ("test", "val") if (path / name).is_dir()]
    if train.is_dir() != bool(tests):
        there, lacking = ("train", "test (or val)") if train.is_dir() else (tests[0].name, "train")
        raise DataError(f"{path} has a folder {there} but no {lacking}; provide both, or only class folders.")
    if tests:
        own: dict[Part, Files] = {"train": _classes(train), "test": _classes(tests[0])}
        for one, other in ((train, tests[0]), (tests[0], train)):
            for name in sorted(_classes(one).keys() - _classes(other).keys()):
                raise DataError(f"class {name!r} is in {one} but not in {other}; provide images in both.")
        return own
    if not 0 < test_share < 1:
        raise UsageError(f"test_share = {test_share}: must be between 0 and 1.")
    files: dict[Part, Files] = {"train": {}, "test": {}}
    for name, images in _classes(path).items():
        if len(images) < 2:
            raise DataError(f"class {name!r} has {len(images)} image(s); expected at least two, one for testing.")
        places = sorted(images, key=lambda image: _hash_position(f"{name}/{image.name}"))
        held_out = [image for image in places if _hash_position(f"{name}/{image.name}") < test_share]
        held_out = held_out[: len(images) - 1] or places[:1]  # at least one for each
        files["test"][name] = sorted(held_out)
        files["train"][name] = sorted(set(images) - set(held_out))
    return files


def _hash_position(name: str) -> float:
    """A number from 0 to 1 from the hash of a file's name, so that adding files does not move it to the other part."""
    # Names that are not UTF-8 count as bytes.
    digest = hashlib.sha256(unicodedata.normalize("NFC", name).encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _classes(path: Path) -> Files:
    """The image files of each folder in `path`, sorted, without hidden ones."""
    files = {}
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            if has_control_characters(folder.name):  # classes name tasks in logs and states
                raise DataError(
                    f"the name of the folder {short_repr(folder.name)} in {path} is not UTF-8 or has control "
                    "characters; rename it."
                )
            files[folder.name] = sorted(
                file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
            )
            if not files[folder.name]:
                raise DataError(f"{folder} contains no images ({', '.join(SUFFIXES)}); add some, or remove the folder.")
    return files


def _arrays(listed: FileList, size: int) -> tuple[Tensor, Tensor]:
    images: Tensor | None = None
    for place, (file, _, _) in enumerate(listed):
        image = decode(read_file(file, _LARGEST_FILE), str(file), _FORMATS, resize=size)
        if images is None:
            images = torch.empty((len(listed), *image.shape), dtype=torch.uint8, device="cpu")
        if image.shape != images.shape[1:]:
            raise DataError(
                f"{file} has {image.shape[2]} × {image.shape[1]} pixels, {listed[0][0]} {images.shape[3]} × "
                f"{images.shape[2]}; set a size to scale them to."
            )
        images[place] = image
    assert images is not None  # no class is empty
    return images, torch.tensor([label for _, label, _ in listed], device="cpu")
