"""Fetching an archive: from mirrors in turn, going on where an earlier attempt stopped, and taken only if it is right.

What has arrived lies in NAME.part. It gets the archive's name when its size and hashes are the publisher's, never
before; where they are not, it is removed.
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

from steppe.data.directory import filling
from steppe.data.sets import Archive
from steppe.errors import DataError
from steppe.version import __version__

Progress = Callable[[int, int], None]
"""Told how many bytes are done, and of how many."""

_TIMEOUT = 30.0  # seconds that a server may be silent
_CHUNK = 1 << 18
_ATTEMPTS = 5  # at one mirror, as long as each brings something


class _MirrorError(Exception):
    """Why a mirror did not serve."""


def download(archive: Archive, directory: Path, progress: Progress) -> Path:
    """Bring the archive into the directory; what failed at each mirror is told where all fail."""
    part, final = directory / f"{archive.name}.part", directory / archive.name
    with filling(directory):
        directory.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in archive.urls:
        try:
            _from_mirror(url, archive, part, progress)
        except _MirrorError as error:
            failures.append(f"  {url}: {error}")
            continue
        with filling(final):
            part.replace(final)
        return final
    kept = f" The {_size(part):,} bytes that came are kept, and the same command goes on there." if _size(part) else ""
    raise DataError(f"{archive.name} could not be fetched:\n" + "\n".join(failures) + f"\nTry again later.{kept}")


def differs(path: Path, archive: Archive) -> str | None:
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


def _from_mirror(url: str, archive: Archive, part: Path, progress: Progress) -> None:
    """Have the right archive in the part file; what turns out to be another one is removed."""
    begun = _size(part) > 0
    _fill(url, archive, part, progress)
    problem = differs(part, archive)
    if problem is not None and begun:  # the beginning may be what is wrong, and it came from elsewhere
        part.unlink()
        _fill(url, archive, part, progress)
        problem = differs(part, archive)
    if problem is not None:
        part.unlink()
        raise _MirrorError(f"sent something else ({problem})")


def _fill(url: str, archive: Archive, part: Path, progress: Progress) -> None:
    """Complete the part file; a connection that breaks is taken up again while it brings something."""
    for _ in range(_ATTEMPTS):
        before = _size(part)
        if before >= archive.size:
            return
        try:
            _one_connection(url, archive, part, progress)
        except urllib.error.HTTPError as error:
            raise _MirrorError(f"answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if _size(part) <= before:
                raise _MirrorError(str(reason) or type(error).__name__) from error
    if _size(part) < archive.size:
        raise _MirrorError(f"broke off at {_size(part):,} of {archive.size:,} bytes")


def _one_connection(url: str, archive: Archive, part: Path, progress: Progress) -> None:
    done = _size(part)
    headers = {"User-Agent": f"steppe/{__version__}", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
        start = _start(answer.status, answer.headers.get("Content-Range", ""), done)
        length = answer.headers.get("Content-Length", "")
        if length.isdecimal() and start + int(length) != archive.size:
            raise _MirrorError(f"has a file of {start + int(length):,} bytes instead of {archive.size:,}")
        with filling(part):
            file = part.open("r+b" if done else "wb")
        with file:
            file.truncate(start)
            file.seek(start)
            done = start
            while done <= archive.size and (block := answer.read(_CHUNK)):
                with filling(part):
                    file.write(block)
                done += len(block)
                progress(min(done, archive.size), archive.size)
            with filling(part):
                file.flush()
                os.fsync(file.fileno())
    if start == 0 and done == 0:
        raise _MirrorError("sent nothing")


def _start(status: int, content_range: str, asked: int) -> int:
    """Where in the file an answer begins: a server may ignore that only the rest was asked for."""
    if status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    told = re.match(r"bytes (\d+)-", content_range)
    if told is None or int(told[1]) != asked:
        raise _MirrorError(f"sent another part of the file ({content_range or 'unnamed'}) than asked for")
    return asked


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
