"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steppe.errors import RunError, UsageError, disk_refusal


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all: beside its place, flushed, then moved, all of it down to
    the disk.
    """
    if not path.name:  # "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _flush_directory(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def _flush_directory(path: Path) -> None:
    """Make a new name in a directory last, where the system can."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def expanded(path: str) -> Path:
    """A path with the home directory in the place of its ~, which a user must have."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no such home directory: write the path out.") from error


def read_bounded(path: Path, limit: int = 100_000_000) -> bytes:
    """A file's content, refused by ValueError where it is larger than such a file can be, or has no end."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {disk_refusal(error)}: mend that, or choose another place.") from error
