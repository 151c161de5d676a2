"""Files: written whole or not at all, and never outside the directory they belong to; read within bounds."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steppe.errors import RunError, UsageError, has_control_characters, os_error_text, short_repr

MOST_BYTES = 32_000_000
"""Of a JSON file: the result of a thousand tasks has 15 MB, the plan of ten thousand runs as many."""
MOST_BYTES_OF_TOML = 64_000
_MOST_CONTAINERS = 1_000_000  # lists and objects of a JSON file: each takes 60 to 200 bytes, from as few as three
_MOST_TEXTS = 2_000_000
_DEEPEST = 300  # levels of lists and objects
_MOST_DOTS = 100  # in a line of TOML: a key of n parts costs n², in time and in memory
_MOST_BRACKETS = 200  # in TOML, which has no use for more in a configuration
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_BINARY = getattr(os, "O_BINARY", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # to open a pipe that nobody writes to would wait for ever


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all: beside its place, flushed, then moved, all of it down to
    the disk. Where the path is a link, the file that it leads to is written.
    """
    place = resolve_target(path)
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    draft = place.with_name(f".{place.name}.part")
    draft.unlink(missing_ok=True)  # of a write that was killed; or a link or a pipe, which must not be written to
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
        _flush_directory(place.parent)
    finally:
        draft.unlink(missing_ok=True)


def resolve_target(path: Path) -> Path:
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


def expand_path(path: str) -> Path:
    """A path with the home directory in the place of its ~, which a user must have; ./~ is a name as any other."""
    if "\0" in path:
        raise UsageError(f"{short_repr(path)} cannot be a path: no file can have the character NUL in its name.")
    if not path.startswith("~"):
        return Path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no such home directory: write the path out.") from error


def inside(root: Path, path: Path) -> Path:
    """The path, which lies in a directory of ours, to be written to, made or removed.

    The directory may be a stranger's: a link in it must not lead us out of it, to files of the user's.

    Args:
        root: The directory, which may be a link itself: the user named it.
        path: A file or directory in it, there or not.

    Raises:
        RunError: The path leads out of the directory, or is a device, a pipe or a socket.
    """
    real = os.path.realpath(path)
    if not Path(real).is_relative_to(os.path.realpath(root)):
        told = short_repr(real) if has_control_characters(real) else real
        raise RunError(f"{path} leads out of {root}, to {told}: remove that link; nothing is written through it.")
    try:
        mode = Path(real).stat().st_mode
    except OSError:  # it is not there, or whoever writes will be told why it cannot be
        return path
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise RunError(f"{path} is {_kind(mode)}, not a file: remove it.")
    return path


def append_to(path: Path) -> int:
    """A descriptor that appends to a file, which is made if it is not there; a pipe does not make us wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _NONBLOCK | _BINARY, 0o666)
    try:
        _require_regular(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bounded(path: Path, limit: int | None = MOST_BYTES) -> bytes:
    """A regular file's content, without waiting for a pipe, and without more of it in memory than is allowed.

    Args:
        path: The file, or a link to it.
        limit: The most bytes it may have; None for no limit but its size.

    Raises:
        OSError: There is no such file, it cannot be read, or it is a directory, a device, a pipe or a socket.
        ValueError: It is larger than the limit.
    """
    _refuse_special(path.stat().st_mode)  # before it is opened: opening a device may do something
    descriptor = os.open(path, os.O_RDONLY | _NONBLOCK | _BINARY)
    with os.fdopen(descriptor, "rb") as file:
        size = _require_regular(descriptor)
        if limit is None:
            return file.read(size)
        content = file.read(limit + 1) if size <= limit else None
    if content is None or len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


def read_json(path: Path, limit: int = MOST_BYTES) -> Any:
    """What a JSON file holds, read within the bounds of `read_bounded` and `parsed_json`."""
    return parsed_json(read_bounded(path, limit))


def parsed_json(content: bytes) -> Any:
    """What a JSON text holds. Refused by ValueError, before anything is made of it, is a text with so many lists,
    objects and texts in it, or so many within each other, that it would fill the memory.
    """
    if content.count(b"[") + content.count(b"{") > _MOST_CONTAINERS or content.count(b'"') > 2 * _MOST_TEXTS:
        raise ValueError("it has more lists, objects or texts than such a file can have")
    depth = 0
    for token in _TOKEN.finditer(content):
        sign = token.group()
        depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
    return json.loads(content.decode("utf-8-sig"))


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds; ValueError where it is larger, or nested deeper, than a configuration can be."""
    return parsed_toml(read_bounded(path, MOST_BYTES_OF_TOML).decode("utf-8-sig"))


def parsed_toml(text: str) -> dict[str, Any]:
    """What a TOML text holds; ValueError where it is nested deeper than a configuration can be."""
    if max((line.count(".") for line in text.split("\n")), default=0) > _MOST_DOTS:
        raise ValueError(f"it has a line with more than {_MOST_DOTS} dots")
    if text.count("[") + text.count("{") > _MOST_BRACKETS:
        raise ValueError(f"it has more than {_MOST_BRACKETS} brackets")
    return tomllib.loads(text)


def _require_regular(descriptor: int) -> int:
    """The size of an open file; refused where it is none."""
    found = os.fstat(descriptor)
    _refuse_special(found.st_mode)
    return found.st_size


def _refuse_special(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {_kind(mode)}, not a file")


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for known, name in kinds if known(mode)), "a device")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {os_error_text(error)}: mend that, or choose another place.") from error
    except ValueError as error:
        if "\0" not in str(path):
            raise
        raise UsageError(f"{short_repr(str(path))} cannot be a path: no file can have NUL in its name.") from error
