"""CIFAR-100 (Krizhevsky 2009): 60,000 images of 32 × 32 in 100 classes, which form 20 superclasses of five.

Read from the publisher's binary or Python files, as folders or as the archives they come in. Whatever the source, the
images come in one order, by class and then by hash, so that the same command gives the same numbers everywhere.
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

from steppe.data import restricted_pickle
from steppe.data.archives import read_file, read_tar
from steppe.data.directory import data_directory, missing_error
from steppe.data.images import ImageArrays, Part
from steppe.errors import DataError

Bytes = NDArray[np.uint8]

# In the publisher's numbering: superclasses by name, and classes by name.
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
    """A superclass and the numbers of its five classes, ascending."""

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
_ROOM = 20_000_000  # what the Python files hold beside the pixels: names of files, labels
# SHA-256 over the hashes of all images with their labels, in this module's order: one changed pixel changes it.
FINGERPRINTS: dict[Part, str] = {
    "train": "f85d1393a3fad671ecf221a3e4695758aefdf71f0d1536eeef7c70131d525bae",
    "test": "4ddcc047126c10da5b96d02a87f6a7fc5804118dab34fe26c49b7fca8f53b714",
}


_KNOWN = [("", "binary"), ("", "python"), (".tar.gz", "binary"), (".tar.gz", "python")]
_AGAIN = "get it again with `steppe data fetch cifar-100`."


class Form(NamedTuple):
    """One of the forms in which the data set may lie in the data directory."""

    path: Path
    binary: bool

    @property
    def packed(self) -> bool:
        return self.path.name.endswith(".tar.gz")


class _Records(NamedTuple):
    """Images as (n, 3072) and their two labels, in the order of a file."""

    images: Bytes
    fine: Bytes
    coarse: Bytes


def load() -> ImageArrays:
    """Images as uint8, (n, 3, 32, 32), in the form found first: a folder, else an archive; read once per process."""
    return _load(data_directory().resolve())


@functools.lru_cache(maxsize=1)  # 184 MB each
def _load(directory: Path) -> ImageArrays:
    found = forms(directory)
    if not found:
        raise missing_error("CIFAR-100", "cifar-100")
    return read(found[0])


def forms(directory: Path) -> list[Form]:
    """The forms that are in a directory, the one that `load` takes first."""
    known = [Form(directory / f"cifar-100-{kind}{end}", kind == "binary") for end, kind in _KNOWN]
    return [form for form in known if form.path.exists()]


def read(form: Form) -> ImageArrays:
    """Read one form whole and check it: numbers of images, labels, and every image by hash."""
    limits = {part: count * _RECORD + (0 if form.binary else _ROOM) for part, count in IMAGES.items()}
    suffix = ".bin" if form.binary else ""
    if form.packed:
        folder = form.path.name.removesuffix(".tar.gz")
        content = read_tar(form.path, {f"{folder}/{part}{suffix}": limit for part, limit in limits.items()})
    arrays: dict[Part, tuple[Tensor, Tensor]] = {}
    for part, limit in limits.items():
        file = form.path / f"{part}{suffix}"
        raw = content.pop(f"{folder}/{part}{suffix}") if form.packed else read_file(file, limit)
        records = _of_binary(raw, str(file)) if form.binary else _of_python(raw, str(file))
        arrays[part] = _canonical_order(records, part, str(file))
    return ImageArrays(arrays["train"], arrays["test"], CLASSES, "CIFAR-100")


def scramble(images: Tensor) -> Tensor:
    """What the paper's released code made of the images: it took the bytes of the three colour planes for pixels of
    three colours each, so that x[c, h, w] became byte 96 h + 3 w + c of the image. Shape (n, 3, 32, 32), as before.
    """
    return images.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


def _of_binary(raw: bytes, file: str) -> _Records:
    if len(raw) % _RECORD:
        raise DataError(f"{file} has {len(raw):,} bytes, no whole number of images: {_AGAIN}")
    table = np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)
    return _Records(table[:, 2:], table[:, 1], table[:, 0])


def _of_python(raw: bytes, file: str) -> _Records:
    content = restricted_pickle.read(raw, file)
    images, fine, coarse = (content.get(key) for key in ("data", "fine_labels", "coarse_labels"))
    if not (isinstance(images, np.ndarray) and isinstance(fine, list) and isinstance(coarse, list)):
        raise DataError(f"{file} lacks data, fine_labels or coarse_labels: {_AGAIN}")
    if images.shape != (len(fine), _PIXELS) or len(fine) != len(coarse):
        raise DataError(
            f"{file} has images of shape {images.shape}, {len(fine)} labels and {len(coarse)} superclasses: {_AGAIN}"
        )
    if not all(isinstance(label, int) and 0 <= label < 256 for label in fine + coarse):
        raise DataError(f"a label in {file} is no class number: {_AGAIN}")
    return _Records(images, np.array(fine, np.uint8), np.array(coarse, np.uint8))


def _canonical_order(records: _Records, part: Part, file: str) -> tuple[Tensor, Tensor]:
    """The images in the order that is the same everywhere, checked."""
    count = IMAGES[part]
    if len(records.fine) != count:
        raise DataError(f"{file} has {len(records.fine):,} images instead of {count:,}: {_AGAIN}")
    if records.fine.max() >= 100 or (np.bincount(records.fine, minlength=100) != count // 100).any():
        raise DataError(f"{file} does not have {count // 100} images of each of 100 classes: {_AGAIN}")
    if (np.array(COARSE)[records.fine] != records.coarse).any():
        raise DataError(f"{file} puts a class into another superclass than its publisher: {_AGAIN}")
    images = np.ascontiguousarray(records.images)
    keys = [
        bytes((label,)) + hashlib.sha256(image).digest()
        for label, image in zip(records.fine.tolist(), images, strict=True)
    ]
    order = sorted(range(count), key=keys.__getitem__)
    fingerprint = hashlib.sha256(b"".join(keys[place] for place in order)).hexdigest()
    if fingerprint != FINGERPRINTS[part]:
        raise DataError(f"{file} holds other images than its publisher's, or damaged ones: {_AGAIN}")
    x = torch.from_numpy(images[order]).reshape(-1, 3, 32, 32)
    return x, torch.from_numpy(records.fine[order].astype(np.int64))
