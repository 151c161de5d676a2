"""CIFAR-100 (Krizhevsky 2009): 60,000 images of 32 × 32 in 100 classes, which form 20 superclasses of five.

Read from the publisher's binary version, as a folder or as the archive that it comes in. (The Python version is a
pickle, which could run code.) Images are sorted by class and then by hash: data from another source must give the same
numbers.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steppe.data.archives import read_file, read_tar
from steppe.data.directory import data_directory, missing_error
from steppe.data.images import ImageArrays, Part
from steppe.errors import DataError

Bytes = NDArray[np.uint8]

# In the order of the publisher's numbers.
_MEMBERS = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}


class Superclass(NamedTuple):
    """A superclass and the numbers of its five classes, in ascending order."""

    name: str
    classes: tuple[int, ...]


CLASSES = tuple(sorted(name for names in _MEMBERS.values() for name in names.split()))
SUPERCLASSES = tuple(
    Superclass(name, tuple(CLASSES.index(member) for member in members.split())) for name, members in _MEMBERS.items()
)
COARSE = tuple(
    next(number for number, coarse in enumerate(SUPERCLASSES) if fine in coarse.classes) for fine in range(100)
)
"""The number of each class's superclass."""

IMAGES: dict[Part, int] = {"train": 50_000, "test": 10_000}
_PIXELS = 3 * 32 * 32
_RECORD = 2 + _PIXELS
# SHA-256 over the hashes of all images and their labels, in this module's order.
FINGERPRINTS: dict[Part, str] = {
    "train": "f85d1393a3fad671ecf221a3e4695758aefdf71f0d1536eeef7c70131d525bae",
    "test": "4ddcc047126c10da5b96d02a87f6a7fc5804118dab34fe26c49b7fca8f53b714",
}

NAME = "cifar-100-binary"
_PYTHON_VERSION = ("cifar-100-python", "cifar-100-python.tar.gz")
_AGAIN = "fetch it again with `steppe data fetch cifar-100`."


class _Records(NamedTuple):
    """Images as (n, 3072) and their two labels, in the order of a file."""

    images: Bytes
    fine: Bytes
    coarse: Bytes


def load() -> ImageArrays:
    """CIFAR-100 from the data directory: the publisher's binary version as a folder, else as an archive.

    Returns:
        Images as uint8, (n, 3, 32, 32), read once per process.

    Raises:
        DataError: It is not there, incomplete or damaged.
    """
    return _load(data_directory().resolve())


@functools.lru_cache(maxsize=1)  # 184 MB each
def _load(directory: Path) -> ImageArrays:
    folder, archive = directory / NAME, directory / f"{NAME}.tar.gz"
    for path in (folder, archive):
        if path.exists():
            return read(path)
    for name in _PYTHON_VERSION:
        if (directory / name).exists():
            raise DataError(
                f"{directory / name} is the Python version of CIFAR-100, a pickle; steppe reads the binary one: "
                f"run `steppe data fetch cifar-100`, or put {archive.name} into {directory}."
            )
    raise missing_error("CIFAR-100", "cifar-100")


def read(path: Path) -> ImageArrays:
    """Read the binary version and check it: the number of images, their labels, and every image by its hash.

    Args:
        path: The publisher's folder or archive.

    Returns:
        The images.

    Raises:
        DataError: It is incomplete or damaged.
    """
    limits = {f"{part}.bin": count * _RECORD for part, count in IMAGES.items()}
    if path.name.endswith(".tar.gz"):
        members = read_tar(path, {f"{NAME}/{file}": limit for file, limit in limits.items()})
        content = {file: members[f"{NAME}/{file}"] for file in limits}
    else:
        content = {file: read_file(path / file, limit) for file, limit in limits.items()}
    train, test = (
        _canonical_order(_parse(content.pop(f"{part}.bin"), f"{path / part}.bin"), part, f"{path / part}.bin")
        for part in IMAGES
    )
    return ImageArrays(train, test, CLASSES, "CIFAR-100")


def scramble(images: Tensor) -> Tensor:
    """The images as the paper's released code read them: it took the bytes of the three color planes for interleaved
    RGB pixels, so that x[c, h, w] is byte 96 h + 3 w + c.

    Args:
        images: (n, 3, 32, 32).

    Returns:
        The same shape.
    """
    return images.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


def _parse(raw: bytes, file: str) -> _Records:
    if len(raw) % _RECORD:
        raise DataError(f"{file} has {len(raw):,} bytes, not a multiple of {_RECORD:,}; {_AGAIN}")
    table = np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)
    return _Records(table[:, 2:], table[:, 1], table[:, 0])


def _canonical_order(records: _Records, part: Part, file: str) -> tuple[Tensor, Tensor]:
    """Check the images, and sort them by class and hash."""
    count = IMAGES[part]
    if len(records.fine) != count:
        raise DataError(f"{file} has {len(records.fine):,} images, expected {count:,}; {_AGAIN}")
    if records.fine.max() >= 100 or (np.bincount(records.fine, minlength=100) != count // 100).any():
        raise DataError(f"{file} does not have {count // 100} images of each of 100 classes; {_AGAIN}")
    if (np.array(COARSE)[records.fine] != records.coarse).any():
        raise DataError(f"{file} has a class with the wrong superclass; {_AGAIN}")
    images = np.ascontiguousarray(records.images)
    keys = [
        bytes((label,)) + hashlib.sha256(image).digest()
        for label, image in zip(records.fine.tolist(), images, strict=True)
    ]
    order = sorted(range(count), key=keys.__getitem__)
    fingerprint = hashlib.sha256(b"".join(keys[place] for place in order)).hexdigest()
    if fingerprint != FINGERPRINTS[part]:
        raise DataError(f"{file} is damaged: its hash is not the publisher's; {_AGAIN}")
    x = torch.from_numpy(images[order]).reshape(-1, 3, 32, 32)
    return x, torch.from_numpy(records.fine[order].astype(np.int64))
