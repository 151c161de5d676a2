"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steppe.errors import RunError, UsageError, disk_refusal, shown


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all: beside its place, flushed, then moved, all of it down to
    the disk. Where the path is a link, the file that it leads to is written.
    """
    place = file_behind(path)
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    draft = place.with_name(f".{place.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
        _flush_directory(place.parent)
    finally:
        draft.unlink(missing_ok=True)


def file_behind(path: Path) -> Path:
    """Where a file is to be written: behind the links. A device or a pipe would be gone, with a file in its place, and
    is refused.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"{path} is a device, a pipe or a socket, not a file: choose another name.")
    place = Path(os.path.realpath(path))
    if place.is_symlink():  # links in a circle lead nowhere
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return place


def _flush_directory(path: Path) -> None:
    """Make a new name in a directory last, where the system can."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def expanded(path: str) -> Path:
    """A path with the home directory in the place of its ~, which a user must have; ./~ is a name as any other."""
    if "\0" in path:
        raise UsageError(f"{shown(path)} cannot be a path: no file can have the character NUL in its name.")
    if not path.startswith("~"):
        return Path(path)
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
    except ValueError as error:
        if "\0" not in str(path):
            raise
        raise UsageError(f"{shown(str(path))} cannot be a path: no file can have NUL in its name.") from error
