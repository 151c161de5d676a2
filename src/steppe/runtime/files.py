"""Files: atomic writes that stay inside their directory, and reads with limits on size and nesting.

Run directories may come from someone else, so links in them are not followed out of them, and no file can make the
process wait for a pipe or run out of memory.
"""

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

MAX_BYTES = 32_000_000
"""Limit for JSON files: the result of a thousand tasks has 15 MB, as has the plan of ten thousand runs."""
MAX_TOML_BYTES = 64_000
_MAX_CONTAINERS = 1_000_000  # lists and objects in a JSON file: 60 to 200 bytes of memory each
_MAX_STRINGS = 2_000_000
_MAX_DEPTH = 300  # levels of lists and objects
_MAX_DOTS = 100  # in a line of TOML: a key of n parts takes n² time and memory
_MAX_BRACKETS = 200  # in TOML: no configuration needs more
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_BINARY = getattr(os, "O_BINARY", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # else opening a pipe without a writer blocks forever


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: to a temporary file beside it, flushed to the disk, then renamed. If the
    path is a link, its target is written.

    Args:
        path: The file.
        content: Its new content.

    Raises:
        IsADirectoryError: The path is a directory.
        OSError: It cannot be written.
        UsageError: The path is a device, a pipe or a socket.
    """
    place = resolve_target(path)
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    draft = place.with_name(f".{place.name}.part")
    draft.unlink(missing_ok=True)  # left by a killed write; or a link or pipe, which must not be written to
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
    """Follow links to the file that a path leads to.

    Args:
        path: The path, which need not exist.

    Returns:
        The file's path.

    Raises:
        UsageError: It is a device, a pipe or a socket, which renaming would replace by a file.
        OSError: The links form a cycle.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"{path} is a device, pipe or socket, not a file; choose another name.")
    place = Path(os.path.realpath(path))
    if place.is_symlink():  # links in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return place


def _flush_directory(path: Path) -> None:
    """Flush a directory's entries to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def expand_path(path: str) -> Path:
    """Expand a leading ~ to the home directory; ./~ is an ordinary name.

    Args:
        path: The path as the user wrote it.

    Returns:
        The path.

    Raises:
        UsageError: It contains NUL, or there is no such home directory.
    """
    if "\0" in path:
        raise UsageError(f"invalid path {short_repr(path)}: file names cannot contain NUL.")
    if not path.startswith("~"):
        return Path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: no such home directory; write out the path.") from error


def require_inside(root: Path, path: Path) -> Path:
    """Check that a path we are about to write, create or remove lies in the directory, through links, too.

    Args:
        root: The directory, which may be a link itself: the user named it.
        path: A file or directory in it, existing or not.

    Returns:
        The path.

    Raises:
        RunError: It leads out of the directory, or is a device, a pipe or a socket.
    """
    real = os.path.realpath(path)
    if not Path(real).is_relative_to(os.path.realpath(root)):
        target = short_repr(real) if has_control_characters(real) else real
        raise RunError(f"{path} leads out of {root}, to {target}; remove that link (nothing is written through it).")
    try:
        mode = Path(real).stat().st_mode
    except OSError:  # it does not exist, or writing to it will raise the reason
        return path
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise RunError(f"{path} is {_kind(mode)}, not a file; remove it.")
    return path


def open_append(path: Path) -> int:
    """Open a file for appending, creating it if needed.

    Args:
        path: The file.

    Returns:
        The descriptor.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _NONBLOCK | _BINARY, 0o666)
    try:
        _require_regular(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bounded(path: Path, limit: int | None = MAX_BYTES) -> bytes:
    """Read a regular file of limited size.

    Args:
        path: The file, or a link to it.
        limit: The largest size in bytes; None for no limit.

    Returns:
        Its content.

    Raises:
        OSError: It does not exist, cannot be read, or is not a regular file.
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


def read_json(path: Path, limit: int = MAX_BYTES) -> Any:
    """The content of a JSON file, with the limits of `read_bounded` and `parse_json`."""
    return parse_json(read_bounded(path, limit))


def parse_json(content: bytes) -> Any:
    """Parse JSON of limited complexity.

    Args:
        content: The JSON.

    Returns:
        The value.

    Raises:
        ValueError: It is invalid, or has so many strings, lists and objects, or such deep nesting, that it would use up
            the memory.

    Example:
        >>> parse_json(b'{"acc": [97.5, 98]}')
        {'acc': [97.5, 98]}
    """
    if content.count(b"[") + content.count(b"{") > _MAX_CONTAINERS or content.count(b'"') > 2 * _MAX_STRINGS:
        raise ValueError("it has too many lists, objects or strings")
    depth = 0
    for token in _TOKEN.finditer(content):
        sign = token.group()
        depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
    return json.loads(content.decode("utf-8-sig"))


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file, with the limits of `parse_toml` and on its size."""
    return parse_toml(read_bounded(path, MAX_TOML_BYTES).decode("utf-8-sig"))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML that is no more complex than a configuration.

    Args:
        text: The TOML.

    Returns:
        The table.

    Raises:
        ValueError: It is invalid or too complex.
    """
    if max((line.count(".") for line in text.split("\n")), default=0) > _MAX_DOTS:
        raise ValueError(f"it has a line with more than {_MAX_DOTS} dots")
    if text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ValueError(f"it has more than {_MAX_BRACKETS} brackets")
    return tomllib.loads(text)


def _require_regular(descriptor: int) -> int:
    """The size of an open file; OSError unless it is a regular file."""
    status = os.fstat(descriptor)
    _refuse_special(status.st_mode)
    return status.st_size


def _refuse_special(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {_kind(mode)}, not a file")


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for known, name in kinds if known(mode)), "a device")


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a RunError that names the path and says what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {os_error_text(error)}; fix that, or choose another location.") from error
    except ValueError as error:
        if "\0" not in str(path):
            raise
        raise UsageError(f"invalid path {short_repr(str(path))}: file names cannot contain NUL.") from error
