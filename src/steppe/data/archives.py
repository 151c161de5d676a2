"""Reading and unpacking archives safely: the folder appears complete or not at all, and nothing is written outside it.

Only regular files and folders inside the one expected top-level folder are accepted. Other paths, links, devices and
too much data are errors.
"""

from __future__ import annotations

import gzip
import io
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from steppe.data.directory import explain_storage_errors
from steppe.errors import DataError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What an archive may unpack to: number of files, bytes of one file and of all, bytes out per byte in."""

    files: int = 150_000
    largest: int = 200_000_000
    total: int = 600_000_000
    ratio: int = 100


LIMITS = Limits()


def unpack(archive: Path, folder: str, limits: Limits = LIMITS) -> Path:
    """Unpack an archive beside it. An existing folder of that name is replaced at the end.

    Args:
        archive: A .tar.gz or .zip file.
        folder: The one top-level folder that it must contain.
        limits: What it may unpack to.

    Returns:
        The folder.

    Raises:
        DataError: The archive is damaged or not the publisher's, or the folder cannot be written.
    """
    target, draft = archive.with_name(folder), archive.with_name(f".{folder}.unpacking")
    with explain_storage_errors(target):
        _remove(draft)  # left by a killed attempt
    try:
        with explain_storage_errors(target):
            draft.mkdir()
        writer = _Writer(archive, folder, draft, limits)
        if ".zip" in archive.suffixes:  # .part may follow
            _unzip(archive, writer)
        else:
            _untar(archive, writer)
        if not writer.files:
            raise DataError(f"{archive} contains no file in a folder {folder}; {DAMAGED}.")
        with explain_storage_errors(target):
            _replace(draft, target)
    finally:
        _remove(draft)
    return target


class _Writer:
    """Checks members and writes them to the draft, within the limits."""

    def __init__(self, archive: Path, folder: str, draft: Path, limits: Limits) -> None:
        self.archive, self.folder, self.draft, self.limits = archive, folder, draft, limits
        self.files = self.total = 0

    def place(self, name: str) -> Path:
        """Where a member goes; DataError if that is outside the folder."""
        parts = name.removeprefix("./").rstrip("/").split("/")
        if parts[0] != self.folder or any(
            not part or part in (".", "..") or set(part) & set("\\:\0") for part in parts
        ):
            raise DataError(
                f"{self.archive} contains {name!r}, which is outside the folder {self.folder}; {_NOT_PUBLISHED}"
            )
        return self.draft.joinpath(*parts[1:])

    def make_folder(self, name: str) -> None:
        path = self.place(name)
        self._count()
        with explain_storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, size: int, content: IO[bytes]) -> None:
        """Write one file of the declared size."""
        path = self.place(name)
        self._count()
        self.total += size
        if size > self.limits.largest or self.total > self.limits.total:
            raise DataError(
                f"{self.archive} unpacks to too much data, with {name!r} ({size:,} bytes); {_NOT_PUBLISHED}"
            )
        with explain_storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = path.open("xb")
            except FileExistsError:
                raise DataError(f"{self.archive} contains {name!r} twice; {_NOT_PUBLISHED}") from None
        left = size
        with file:
            while left and (block := content.read(min(left, _CHUNK))):
                left -= len(block)
                with explain_storage_errors(path):
                    file.write(block)
        if left:
            raise DataError(f"{self.archive}: {name!r} ends {left:,} bytes early; {DAMAGED}.")

    def _count(self) -> None:
        self.files += 1
        if self.files > self.limits.files:
            raise DataError(f"{self.archive} contains more than {self.limits.files:,} files; {_NOT_PUBLISHED}")


_NOT_PUBLISHED = "this is not the publisher's archive: remove it and fetch the data set again."


def _untar(archive: Path, writer: _Writer) -> None:
    limits = writer.limits
    headers = 2048 * limits.files  # tar pads its members, and itself
    bound = min(limits.total + headers, limits.ratio * archive.stat().st_size) + 2 * tarfile.RECORDSIZE
    with explain_read_errors(archive), BoundedGzip(archive, bound) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as members:
            for member in members:
                if member.isdir():
                    writer.make_folder(member.name)
                    continue
                content = members.extractfile(member) if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) else None
                if content is None:
                    raise DataError(f"{archive}: {member.name!r} is a link or not a regular file; {_NOT_PUBLISHED}")
                writer.write(member.name, member.size, content)
        while stream.read(_CHUNK):  # to the end, where gzip keeps its checksum
            pass


def _unzip(archive: Path, writer: _Writer) -> None:
    with explain_read_errors(archive), zipfile.ZipFile(archive) as members:
        for member in members.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or member.flag_bits & 1:
                raise DataError(
                    f"{archive}: {member.filename!r} is a link, encrypted or not a regular file; {_NOT_PUBLISHED}"
                )
            if member.is_dir():
                writer.make_folder(member.filename)
                continue
            if member.file_size > writer.limits.ratio * max(member.compress_size, 1):
                raise DataError(f"{archive}: {member.filename!r} is compressed suspiciously well; {_NOT_PUBLISHED}")
            with members.open(member) as content:
                writer.write(member.filename, member.file_size, content)


def _replace(draft: Path, target: Path) -> None:
    """Move the draft to the target, which is kept until then."""
    if not target.exists():
        draft.rename(target)
        return
    old = target.with_name(f".{target.name}.old")
    _remove(old)
    target.rename(old)
    draft.rename(target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


DAMAGED = "it is damaged or incomplete: remove it and fetch it again"


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Args:
        path: The file.
        limit: The largest size accepted, in bytes.

    Returns:
        Its content.

    Raises:
        DataError: It is missing, too large or unreadable.
    """
    try:
        if not path.is_file():
            raise DataError(f"{path} is missing or not a regular file; fetch the data set again.")
        with path.open("rb") as file:
            return _read_at_most(file, limit, str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def read_tar(path: Path, limits: Mapping[str, int]) -> dict[str, bytes]:
    """Read members of a .tar.gz in one pass, to the end, where gzip has its checksum.

    Args:
        path: The archive.
        limits: The members to read, with the most bytes that each may have.

    Returns:
        The content of each.

    Raises:
        DataError: The archive is damaged, or lacks a member.
    """
    contents: dict[str, bytes] = {}
    with explain_read_errors(path), BoundedGzip(path, 2 * sum(limits.values())) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if name not in limits:
                    continue
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or name in contents:
                    raise DataError(f"{path}: {name} is not a regular file or occurs twice; fetch the archive again.")
                contents[name] = _read_at_most(content, limits[name], f"{path}: {name}")
        while stream.read(1 << 20):
            pass
    for name in limits.keys() - contents.keys():
        raise DataError(f"{path} does not contain {name}; {DAMAGED}.")
    return contents


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turn any error of a reader inside into a DataError that names the archive."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # readers raise a dozen types of errors on damaged files
        raise DataError(f"{path} cannot be read ({error}); {DAMAGED}.") from error


def _read_at_most(file: IO[bytes], limit: int, name: str) -> bytes:
    content = file.read(limit + 1)
    if len(content) > limit:
        raise DataError(f"{name} is larger than {limit:,} bytes; fetch the data set again.")
    return content


class BoundedGzip(io.BufferedIOBase):
    """The content of a .gz file, at most `limit` bytes of it, so that a small file cannot unpack forever."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit, self.count = path, limit, 0
        self.file = gzip.open(path)  # noqa: SIM115 (closed with this)

    def close(self) -> None:
        self.file.close()
        super().close()

    def read(self, size: int | None = -1, /) -> bytes:
        most = self.limit - self.count + 1
        content = self.file.read(most if size is None or size < 0 else min(size, most))
        self.count += len(content)
        if self.count > self.limit:
            raise DataError(f"{self.path} unpacks to more than {self.limit:,} bytes; it is not the publisher's.")
        return content
