"""TinyImageNet (Stanford CS231n): 64 × 64 images; in each class 500 for training and 50 for testing (the official
validation images).

Read from the publisher's folder or zip file. Decoding everything takes a while and a gigabyte of memory, so a class is
decoded when it is first used.
"""

from __future__ import annotations

import functools
import os
import re
import zipfile
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from steppe.data.archives import explain_read_errors, read_file
from steppe.data.decoding import decode
from steppe.data.directory import data_directory, missing_error
from steppe.data.images import ImageSet, Part
from steppe.errors import DataError

NAME = "tiny-imagenet-200"
PER_CLASS: dict[Part, int] = {"train": 500, "test": 50}
_SIDE = 64
_LARGEST_FILE = 1_000_000  # bytes of one JPEG; the publisher's have a few thousand
_LARGEST_TEXT = 10_000_000
_MAX_FILES = 200_000
_MAX_CACHED = 100  # decoded classes, training or test images: at most 600 MB
_WNID = re.compile(r"n\d{8}")
_AGAIN = "fetch it again with `steppe data fetch tiny-imagenet`."


class Source(ABC):
    """Where the files are read from; names are relative to the publisher's top folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The names of all image files."""

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """The content of one file of at most `limit` bytes."""


class FolderSource(Source):
    """The publisher's folder."""

    def names(self) -> Iterable[str]:
        for folder in [*sorted(self.path.glob("train/*/images")), self.path / "val" / "images"]:
            if folder.is_dir():
                inside = folder.relative_to(self.path).as_posix()
                yield from (f"{inside}/{name}" for name in os.listdir(folder))  # noqa: PTH208 (Paths are slow here)

    def read(self, name: str, limit: int) -> bytes:
        return read_file(self.path / name, limit)


class ZipSource(Source):
    """The publisher's zip file, read without unpacking it."""

    def names(self) -> Iterable[str]:
        inside = _open_zip(self.path, os.getpid()).namelist()
        if len(inside) > _MAX_FILES:
            raise DataError(f"{self.path} contains {len(inside):,} files, more than the publisher's; {_AGAIN}")
        return [name.removeprefix(f"{NAME}/") for name in inside if name.endswith(".JPEG")]

    def read(self, name: str, limit: int) -> bytes:
        archive = _open_zip(self.path, os.getpid())
        with explain_read_errors(self.path), archive.open(f"{NAME}/{name}") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise DataError(f"{self.path}: {name} unpacks to more than {limit:,} bytes; {_AGAIN}")
        return content


@functools.lru_cache(maxsize=2)
def _open_zip(path: Path, process: int) -> zipfile.ZipFile:
    """One open file per process: a forked process that shared its parent's would move the parent's file position."""
    with explain_read_errors(path):
        return zipfile.ZipFile(path)


class TinyImageNet(ImageSet):
    """The classes of a source, sorted by WordNet ID.

    Args:
        source: Where the files are.

    Raises:
        DataError: Images are missing.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files = _by_class(source)
        self.classes = tuple(sorted(self._files["train"]))
        self._check()
        self._decoded: OrderedDict[tuple[Part, int], Tensor] = OrderedDict()

    def select(self, part: Part, classes: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        chosen = range(len(self.classes)) if classes is None else classes
        labels = torch.as_tensor(list(chosen), dtype=torch.int64).repeat_interleave(PER_CLASS[part])
        images = [self._class(part, label) for label in chosen]
        return torch.cat(images) if images else torch.empty(0, 3, _SIDE, _SIDE, dtype=torch.uint8, device="cpu"), labels

    def decode_all(self, progress: Callable[[int, int], None]) -> int:
        """Decode every image once, without keeping it.

        Args:
            progress: Called with the number done and the total.

        Returns:
            The number of images.

        Raises:
            DataError: An image is damaged.
        """
        names = [name for part in self._files.values() for wnid in self.classes for name in part[wnid]]
        for done, name in enumerate(names, 1):
            self._image(name)
            if done % 500 == 0 or done == len(names):
                progress(done, len(names))
        return len(names)

    def _class(self, part: Part, label: int) -> Tensor:
        """All images of one class, sorted by file name; (n, 3, 64, 64)."""
        key = (part, label)
        if key not in self._decoded:
            names = self._files[part][self.classes[label]]
            self._decoded[key] = torch.stack([self._image(name) for name in names])
            if len(self._decoded) > _MAX_CACHED:
                self._decoded.popitem(last=False)
        return self._decoded[key]

    def _image(self, name: str) -> Tensor:
        raw = self._source.read(name, _LARGEST_FILE)
        return decode(raw, f"{self._source.path}: {name}", ("JPEG",), exact_size=(_SIDE, _SIDE))

    def _check(self) -> None:
        """DataError if images are missing: half an archive must not pass for a smaller data set."""
        path = self._source.path
        listed = set(self._source.read("wnids.txt", _LARGEST_TEXT).decode("utf-8", "replace").split())
        if not listed or listed != set(self.classes):
            raise DataError(
                f"{path} has images of {len(self.classes)} classes, but wnids.txt lists {len(listed)}; {_AGAIN}"
            )
        for part, count in PER_CLASS.items():
            for wnid in self.classes:
                if (number := len(self._files[part][wnid])) != count:
                    raise DataError(f"{path} has {number} {part} images of class {wnid}, expected {count}; {_AGAIN}")


def load() -> TinyImageNet:
    """Open TinyImageNet in the data directory, once per process; the folder is preferred to the zip file.

    Returns:
        The data set.

    Raises:
        DataError: It is missing or incomplete.
    """
    return _load(data_directory().resolve())


@functools.lru_cache(maxsize=1)
def _load(directory: Path) -> TinyImageNet:
    available = find_sources(directory)
    if not available:
        raise missing_error("TinyImageNet", "tiny-imagenet")
    return TinyImageNet(available[0])


def find_sources(directory: Path) -> list[Source]:
    """The sources in a directory, the one that `load` uses first."""
    known = [FolderSource(directory / NAME), ZipSource(directory / f"{NAME}.zip")]
    return [source for source in known if source.path.exists()]


def _by_class(source: Source) -> dict[Part, defaultdict[str, list[str]]]:
    """The names of the image files of each class, sorted."""
    classes = _annotations(source)
    files: dict[Part, defaultdict[str, list[str]]] = {"train": defaultdict(list), "test": defaultdict(list)}
    for name in sorted(source.names()):
        first, *middle, last = name.split("/")
        if not last.endswith(".JPEG"):
            continue
        if first == "train" and len(middle) == 2 and _WNID.fullmatch(middle[0]):
            files["train"][middle[0]].append(name)
        elif first == "val" and middle == ["images"]:
            if last not in classes:
                raise DataError(f"{source.path}: val_annotations.txt has no class for {last}; {_AGAIN}")
            files["test"][classes[last]].append(name)
    return files


def _annotations(source: Source) -> dict[str, str]:
    """The class of each validation image."""
    text = source.read("val/val_annotations.txt", _LARGEST_TEXT).decode("utf-8", "replace")
    rows = [line.split("\t") for line in text.splitlines() if line.strip()]
    if any(len(row) < 2 or not _WNID.fullmatch(row[1]) for row in rows):
        raise DataError(f"{source.path}: val_annotations.txt has a line without a file or its class; {_AGAIN}")
    return {row[0]: row[1] for row in rows}
