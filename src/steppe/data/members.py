"""Files within a folder or a packed archive, read into memory by name and never more of them than was announced."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from steppe.errors import DataError

DAMAGED = "it is damaged or was downloaded by half: remove it and get it again"


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    try:
        if not path.is_file():
            raise DataError(f"{path} is missing or no regular file: get the data set again.")
        with path.open("rb") as file:
            return _bounded(file, limit, str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def read_tar(path: Path, limits: Mapping[str, int]) -> dict[str, bytes]:
    """The members of a .tar.gz that `limits` names, each of at most that many bytes, from one walk through it.

    The walk goes on to the end, where gzip keeps the checksum of everything.
    """
    found: dict[str, bytes] = {}
    with reading(path), Bounded(path, 2 * sum(limits.values())) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if name not in limits:
                    continue
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or name in found:
                    raise DataError(f"{path}: {name} is no plain file or is there twice: get the archive again.")
                found[name] = _bounded(content, limits[name], f"{path}: {name}")
        while stream.read(1 << 20):
            pass
    for name in limits.keys() - found.keys():
        raise DataError(f"{path} holds no {name}: {DAMAGED}.")
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever an archive's reader stumbles over into an error that names the archive."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # on damaged files the readers raise errors of a dozen types
        raise DataError(f"{path} cannot be read ({error}): {DAMAGED}.") from error


def _bounded(file: IO[bytes], limit: int, name: str) -> bytes:
    content = file.read(limit + 1)
    if len(content) > limit:
        raise DataError(f"{name} is larger than the {limit:,} bytes it should have: get the data set again.")
    return content


class Bounded(io.BufferedIOBase):
    """The content of a .gz file, never more than `limit` bytes of it: a small file cannot unpack without end."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit, self.given = path, limit, 0
        self.file = gzip.open(path)  # noqa: SIM115 (closed with this)

    def close(self) -> None:
        self.file.close()
        super().close()

    def read(self, size: int | None = -1, /) -> bytes:
        room = self.limit - self.given + 1
        content = self.file.read(room if size is None or size < 0 else min(size, room))
        self.given += len(content)
        if self.given > self.limit:
            raise DataError(f"{self.path} unpacks to more than {self.limit:,} bytes: it is not the publisher's.")
        return content
