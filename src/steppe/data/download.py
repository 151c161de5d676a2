"""Fetching an archive: from mirrors in turn, going on where an earlier attempt stopped, and taken only if it is right.

What has arrived lies in NAME.part and is handed on when its size and hashes are the publisher's; where they are not, it
is removed. It never gets the archive's own name: what bears that was put there by hand, and is not ours to remove. A
server that can only begin anew fills NAME.fresh.part, which takes the other's place when it is longer: what has arrived
is not given up for what may never come.
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
"""Told how many bytes are done, and of how many."""

_TIMEOUT = 30.0  # seconds that a server may be silent
_PATIENCE = 120.0  # seconds that a mirror may take for anything, beside those that sending takes
_MIN_SPEED = 20_000  # bytes a second that a mirror must send, taken over all that is to come
_LENGTH = re.compile(r"[0-9]{1,18}")  # more digits are no length of a file
_CHUNK = 1 << 18
_ATTEMPTS = 5  # at one mirror, as long as each brings something
_MAGIC = {".gz": b"\x1f\x8b", ".zip": b"PK\x03\x04"}  # what such files begin with, and notices in their place do not


class _MirrorError(Exception):
    """Why a mirror did not serve."""


def download(archive: Archive, directory: Path, progress: Progress) -> Path:
    """Bring the archive into the directory, as NAME.part; what failed at each mirror is told where all fail."""
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
    kept = f" The {_size(part):,} bytes that came are kept, and the same command goes on there." if _size(part) else ""
    raise DataError(f"{archive.name} could not be fetched:\n" + "\n".join(failures) + f"\nTry again later.{kept}")


def part_paths(archive: Archive, directory: Path) -> tuple[Path, Path]:
    """The files that fetching the archive fills: the one that it goes on with, and the one to begin anew in."""
    part = directory / f"{archive.name}.part"
    return part, _restart_path(part)


def find_mismatch(path: Path, archive: Archive) -> str | None:
    """In what a file differs from the publisher's archive, if it does."""
    if (size := _size(path)) != archive.size:
        return f"{size:,} bytes instead of {archive.size:,}"
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            md5.update(block)
            sha256.update(block)
    right = (md5.hexdigest(), sha256.hexdigest()) == (archive.md5, archive.sha256)
    return None if right else "its hash is not the publisher's"


def _fetch_from(url: str, archive: Archive, part: Path, progress: Progress) -> None:
    """Have the right archive in the part file; what turns out to be another one is removed."""
    begun = _size(part) > 0
    _fill_in_time(url, archive, part, progress)
    problem = find_mismatch(part, archive)
    if problem is not None and begun:  # the beginning may be what is wrong, and it came from elsewhere
        part.unlink()
        _fill_in_time(url, archive, part, progress)
        problem = find_mismatch(part, archive)
    if problem is not None:
        part.unlink()
        raise _MirrorError(f"sent something else ({problem})")


def _fill_in_time(url: str, archive: Archive, part: Path, progress: Progress) -> None:
    """Complete the part file in a time that suits what is missing of it."""
    seconds = _PATIENCE + (archive.size - _size(part)) / _MIN_SPEED
    deadline = Deadline(seconds)
    try:
        with deadline.running():
            _fill(url, archive, part, progress, deadline)
    except _MirrorError as error:
        if deadline.is_over:
            raise _MirrorError(f"is too slow: {_size(part):,} bytes were here after {seconds:,.0f} seconds") from error
        raise


def _fill(url: str, archive: Archive, part: Path, progress: Progress, deadline: Deadline) -> None:
    """Complete the part file; a connection that breaks is taken up again while it brings something."""
    for _ in range(_ATTEMPTS):
        before = _size(part)
        if before >= archive.size or deadline.is_over:
            break
        try:
            _one_connection(url, archive, part, progress, deadline)
        except urllib.error.HTTPError as error:
            raise _MirrorError(f"answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: numbers that cannot be
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
        if answer.headers.get_content_type() == "text/html":  # to log in, or a proxy's notice
            raise _MirrorError("sent a web page instead of the archive")
        start = _start_offset(answer.status, answer.headers.get("Content-Range", ""), done)
        length = answer.headers.get("Content-Length", "")
        if length and not _LENGTH.fullmatch(length):
            raise _MirrorError(f"tells a length that cannot be ({short_repr(length)})")
        if length and start + int(length) != archive.size:
            raise _MirrorError(f"has a file of {start + int(length):,} bytes instead of {archive.size:,}")
        if start == done:
            _receive(answer, archive, part, start, progress)
        else:
            _restart(answer, archive, part, progress)


def _restart(answer: http.client.HTTPResponse, archive: Archive, part: Path, progress: Progress) -> None:
    """Take a whole archive where only the rest was asked for; what was there goes when more than that is here."""
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
        raise _MirrorError(f"began anew and broke off at {came:,} of {archive.size:,} bytes")


def _receive(answer: http.client.HTTPResponse, archive: Archive, path: Path, start: int, progress: Progress) -> None:
    """Put what comes into the file from `start` on; nothing is written of what does not begin as the archive does."""
    block = _first_block(answer, archive)
    if start == 0 and not block:
        raise _MirrorError("sent nothing")
    if start == 0 and not block.startswith(_magic(archive)):
        raise _MirrorError(f"sent something else (it does not begin as {archive.name} does)")
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
    """The first bytes that come, as many as are looked at or more."""
    block = b""
    while len(block) < len(_magic(archive)) and (more := answer.read1(_CHUNK)):  # `read` waits for all of a block
        block += more
    return block


def _start_offset(status: int, content_range: str, asked: int) -> int:
    """Where in the file an answer begins: a server may ignore that only the rest was asked for."""
    if status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    told = re.match(r"bytes ([0-9]{1,18})-", content_range)
    if told is None or int(told[1]) != asked:
        raise _MirrorError(
            f"sent the wrong part of the file ({short_repr(content_range) if content_range else 'unnamed'})"
        )
    return asked


def _reuse_partial(archive: Archive, part: Path) -> None:
    """Of what earlier attempts left, keep the longest that begins as the archive does."""
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
