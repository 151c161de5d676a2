"""Download an archive: try mirrors in turn, resume earlier attempts, and check size and hashes.

Data is downloaded to NAME.part, which is deleted if it turns out wrong. It is never renamed to NAME: a file of that
name was put there by the user, and is not ours to delete. A server that cannot resume writes to NAME.fresh.part, which
replaces NAME.part once it is longer, so that nothing is thrown away for a download that may fail.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from steppe.data.catalogue import Archive
from steppe.data.deadline import Deadline
from steppe.data.directory import explain_storage_errors
from steppe.errors import DataError, short_repr
from steppe.version import __version__

Progress = Callable[[int, int], None]
"""Called with the bytes done and their total."""

_TIMEOUT = 30.0  # seconds that a server may be silent
_PATIENCE = 120.0  # seconds that a mirror may take beyond those for sending
_MIN_SPEED = 20_000  # bytes per second that a mirror must send on average
_LENGTH = re.compile(r"[0-9]{1,18}")  # no file is longer
_CHUNK = 1 << 18
_ATTEMPTS = 5  # at one mirror, while each one brings data
_MAGIC = {".gz": b"\x1f\x8b", ".zip": b"PK\x03\x04"}  # unlike error pages sent in their place


class _MirrorError(Exception):
    """Why a mirror failed."""


def download(archive: Archive, directory: Path, progress: Progress) -> Path:
    """Download the archive.

    Args:
        archive: The archive.
        directory: Where to put it.
        progress: Called with the bytes done and their total.

    Returns:
        The complete and checked file, NAME.part.

    Raises:
        DataError: All mirrors failed (it says how), or the file cannot be written.
    """
    part, _ = part_paths(archive, directory)
    with explain_storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _reuse_partial(archive, part)
    failures = []
    for url in archive.urls:
        try:
            _fetch_from(url, archive, part, progress)
        except _MirrorError as error:
            failures.append(f"  {url}: {error}")
            continue
        return part
    kept = f" The first {_size(part):,} bytes are kept; the same command resumes there." if _size(part) else ""
    raise DataError(f"{archive.name} could not be downloaded:\n" + "\n".join(failures) + f"\nTry again later.{kept}")


def part_paths(archive: Archive, directory: Path) -> tuple[Path, Path]:
    """The files that a download writes: the one that it resumes, and the one to start over in."""
    part = directory / f"{archive.name}.part"
    return part, _restart_path(part)


def find_mismatch(path: Path, archive: Archive) -> str | None:
    """How a file differs from the publisher's archive; None if it does not."""
    if (size := _size(path)) != archive.size:
        return f"{size:,} bytes, expected {archive.size:,}"
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            md5.update(block)
            sha256.update(block)
    right = (md5.hexdigest(), sha256.hexdigest()) == (archive.md5, archive.sha256)
    return None if right else "its hash is not the publisher's"


def _fetch_from(url: str, archive: Archive, part: Path, progress: Progress) -> None:
    """Complete the part file from one mirror and check it; delete it if it is wrong."""
    begun = _size(part) > 0
    _fill_in_time(url, archive, part, progress)
    problem = find_mismatch(part, archive)
    if problem is not None and begun:  # the first part, from elsewhere, may be what is wrong
        part.unlink()
        _fill_in_time(url, archive, part, progress)
        problem = find_mismatch(part, archive)
    if problem is not None:
        part.unlink()
        raise _MirrorError(f"sent something else ({problem})")


def _fill_in_time(url: str, archive: Archive, part: Path, progress: Progress) -> None:
    """Complete the part file within a time limit that depends on what is missing."""
    seconds = _PATIENCE + (archive.size - _size(part)) / _MIN_SPEED
    deadline = Deadline(seconds)
    try:
        with deadline.running():
            _fill(url, archive, part, progress, deadline)
    except _MirrorError as error:
        if deadline.is_over:
            raise _MirrorError(f"is too slow: {_size(part):,} bytes after {seconds:,.0f} seconds") from error
        raise


def _fill(url: str, archive: Archive, part: Path, progress: Progress, deadline: Deadline) -> None:
    """Complete the part file; reconnect after failures, while each connection brings data."""
    for _ in range(_ATTEMPTS):
        before = _size(part)
        if before >= archive.size or deadline.is_over:
            break
        try:
            _one_connection(url, archive, part, progress, deadline)
        except urllib.error.HTTPError as error:
            raise _MirrorError(f"answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: invalid numbers
            reason = getattr(error, "reason", None) or error
            if _size(part) <= before:
                raise _MirrorError(str(reason) or type(error).__name__) from error
    if _size(part) < archive.size:
        raise _MirrorError(f"broke off at {_size(part):,} of {archive.size:,} bytes")


def _one_connection(url: str, archive: Archive, part: Path, progress: Progress, deadline: Deadline) -> None:
    done = _size(part)
    headers = {"User-Agent": f"steppe/{__version__}", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    with deadline.open(urllib.request.Request(url, headers=headers), _TIMEOUT) as answer:
        if answer.headers.get_content_type() == "text/html":  # a login page or a proxy's notice
            raise _MirrorError("sent a web page instead of the archive")
        start = _start_offset(answer.status, answer.headers.get("Content-Range", ""), done)
        length = answer.headers.get("Content-Length", "")
        if length and not _LENGTH.fullmatch(length):
            raise _MirrorError(f"sent an invalid length ({short_repr(length)})")
        if length and start + int(length) != archive.size:
            raise _MirrorError(f"has a file of {start + int(length):,} bytes, expected {archive.size:,}")
        if start == done:
            _receive(answer, archive, part, start, progress)
        else:
            _restart(answer, archive, part, progress)


def _restart(answer: http.client.HTTPResponse, archive: Archive, part: Path, progress: Progress) -> None:
    """Download from the start, as the server cannot resume; keep the longer file."""
    fresh, before = _restart_path(part), _size(part)
    try:
        _receive(answer, archive, fresh, 0, progress)
        came = _size(fresh)
        problem = find_mismatch(fresh, archive) if came >= archive.size else None
        if problem is not None:
            fresh.unlink()
            raise _MirrorError(f"sent something else ({problem})")
    finally:
        with explain_storage_errors(part):
            _keep_longer(fresh, part)
    if came <= before:
        raise _MirrorError(f"started over and broke off at {came:,} of {archive.size:,} bytes")


def _receive(answer: http.client.HTTPResponse, archive: Archive, path: Path, start: int, progress: Progress) -> None:
    """Write the response to the file from `start` on, unless it does not begin like such an archive."""
    block = _first_block(answer, archive)
    if start == 0 and not block:
        raise _MirrorError("sent nothing")
    if start == 0 and not block.startswith(_magic(archive)):
        raise _MirrorError(f"sent something else (it does not begin like {archive.name})")
    with explain_storage_errors(path):
        file = path.open("r+b" if start else "wb")
    done = start
    with file:
        file.seek(start)
        while block:
            with explain_storage_errors(path):
                file.write(block)
            done += len(block)
            progress(min(done, archive.size), archive.size)
            block = answer.read1(_CHUNK) if done <= archive.size else b""
        with explain_storage_errors(path):
            file.flush()
            os.fsync(file.fileno())


def _first_block(answer: http.client.HTTPResponse, archive: Archive) -> bytes:
    """The first bytes of the response, at least as many as the magic number has."""
    block = b""
    while len(block) < len(_magic(archive)) and (more := answer.read1(_CHUNK)):  # `read` would wait for a full block
        block += more
    return block


def _start_offset(status: int, content_range: str, offset: int) -> int:
    """The offset at which a response starts: a server may ignore the requested range."""
    if status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    match = re.match(r"bytes ([0-9]{1,18})-", content_range)
    if match is None or int(match[1]) != offset:
        raise _MirrorError(
            f"sent the wrong part of the file ({short_repr(content_range) if content_range else 'unnamed'})"
        )
    return offset


def _reuse_partial(archive: Archive, part: Path) -> None:
    """Of the files left by earlier attempts, keep the longest that begins like the archive."""
    for path in (part, _restart_path(part)):
        if _size(path):
            with path.open("rb") as file:
                opening = file.read(len(_magic(archive)))
            if not _magic(archive).startswith(opening):
                path.unlink()
    _keep_longer(_restart_path(part), part)


def _keep_longer(fresh: Path, part: Path) -> None:
    if _size(fresh) > _size(part):
        fresh.replace(part)
    else:
        fresh.unlink(missing_ok=True)


def _restart_path(part: Path) -> Path:
    return part.with_suffix(".fresh.part")


def _magic(archive: Archive) -> bytes:
    return _MAGIC[Path(archive.name).suffix]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
