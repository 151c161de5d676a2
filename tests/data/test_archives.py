"""Unpacking: the folder appears complete or not at all, and a malicious archive leaves nothing behind."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steppe.data.archives import Limits, unpack
from steppe.errors import DataError

LIMITS = Limits(files=20, largest=10_000, total=15_000, ratio=100)
NOISE = os.urandom(3000)
Entry = tuple[str, bytes]
GOOD: list[Entry] = [("set/a.bin", NOISE), ("set/inner/b.txt", b"hello"), ("set/inner/empty", b"")]


def tar(path: Path, entries: list[Entry], change: Callable[[tarfile.TarInfo], None] = lambda info: None) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            packed.addfile(info, io.BytesIO(content))
    return path


def zipped(path: Path, entries: list[Entry], mode: int = 0, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as packed:
        for name, content in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = method
            packed.writestr(info, content)
    return path


MAKERS = {"set.tar.gz": tar, "set.zip": zipped}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("ending", ["", ".part"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_folder_appears(name: str, ending: str, tmp_path: Path) -> None:
    """From an archive that the user put there, or from a downloaded one."""
    archive = MAKERS[name](tmp_path / f"{name}{ending}", GOOD)
    assert unpack(archive, "set", LIMITS) == tmp_path / "set"
    assert names_in(tmp_path) == ["set", f"{name}{ending}"]
    assert all((tmp_path / inside).read_bytes() == content for inside, content in GOOD)


@pytest.mark.parametrize("name", MAKERS)
def test_existing_folder_is_replaced(name: str, tmp_path: Path) -> None:
    """What a killed attempt left is removed."""
    for stale in ("set", ".set.unpacking", ".set.old"):
        (tmp_path / stale / "deep").mkdir(parents=True)
        (tmp_path / stale / "deep" / "stale").write_bytes(b"x")
    unpack(MAKERS[name](tmp_path / name, GOOD), "set", LIMITS)
    assert names_in(tmp_path) == ["set", name]
    assert names_in(tmp_path / "set") == ["a.bin", "inner"]


NAMES = {
    "parent": "set/../../evil",
    "parent at once": "../evil",
    "absolute": "/tmp/evil",
    "another folder": "other/evil",
    "beside": "evil",
    "a name that begins alike": "settings/evil",
    "backslash": "set\\..\\evil",
    "drive": "set/C:evil",
    "dot": "set/./evil",
    "empty component": "set//evil",
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("case", NAMES)
def test_paths_outside_the_folder_are_rejected(case: str, name: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    archive = MAKERS[name](inner / name, [*GOOD, (NAMES[case], b"evil")])
    with pytest.raises(DataError, match="outside the folder set"):
        unpack(archive, "set", LIMITS)
    assert names_in(inner) == [name]
    assert names_in(tmp_path) == ["inner"]


def as_type(kind: bytes) -> Callable[[tarfile.TarInfo], None]:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.size, info.linkname = kind, 0, "/etc/passwd"

    return change


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_links_and_devices_in_a_tar_are_rejected(kind: bytes, tmp_path: Path) -> None:
    archive = tar(tmp_path / "set.tar.gz", [("set/link", b"")], as_type(kind))
    with pytest.raises(DataError, match="a link or not a regular file"):
        unpack(archive, "set", LIMITS)
    assert names_in(tmp_path) == ["set.tar.gz"]


@pytest.mark.parametrize("mode", [stat.S_IFLNK | 0o777, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_in_a_zip_are_rejected(mode: int, tmp_path: Path) -> None:
    archive = zipped(tmp_path / "set.zip", [("set/link", b"/etc/passwd")], mode)
    with pytest.raises(DataError, match="not a regular file"):
        unpack(archive, "set", LIMITS)
    assert names_in(tmp_path) == ["set.zip"]


BOMBS: dict[str, tuple[list[Entry], str]] = {
    "a large file": ([("set/a", os.urandom(10_001))], "too much data"),
    "much in all": ([(f"set/{n}", os.urandom(8000)) for n in range(2)], "too much data"),
    "many files": ([(f"set/{n}", b"x") for n in range(21)], "more than 20 files"),
    "twice the same": ([("set/a", b"1"), ("set/a", b"2")], "twice"),
    "nothing": ([], "contains no file"),
    "a file that is a folder too": ([("set/a", b"1"), ("set/a/b", b"2")], "cannot write"),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("case", BOMBS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_beyond_the_limits_are_rejected(case: str, name: str, tmp_path: Path) -> None:
    entries, message = BOMBS[case]
    archive = MAKERS[name](tmp_path / name, entries)
    with pytest.raises(DataError, match=message):
        unpack(archive, "set", LIMITS)
    assert names_in(tmp_path) == [name]


def test_suspicious_compression_is_rejected(tmp_path: Path) -> None:
    roomy = Limits(files=20, largest=10**9, total=10**9, ratio=100)
    zeros = bytes(3_000_000)
    with pytest.raises(DataError, match="compressed suspiciously well"):
        unpack(zipped(tmp_path / "set.zip", [("set/zeros", zeros)]), "set", roomy)
    with pytest.raises(DataError, match="unpacks to more than"):
        unpack(tar(tmp_path / "set.tar.gz", [("set/zeros", zeros)]), "set", roomy)
    assert names_in(tmp_path) == ["set.tar.gz", "set.zip"]


def test_zip_with_wrong_sizes_is_rejected(tmp_path: Path) -> None:
    """Its directory declares five bytes for a file that unpacks to 5,000."""
    archive = zipped(tmp_path / "set.zip", [("set/a", bytes(5000))])
    raw = archive.read_bytes()
    archive.write_bytes(raw.replace((5000).to_bytes(4, "little"), (5).to_bytes(4, "little")))
    with pytest.raises(DataError, match=r"set\.zip"):
        unpack(archive, "set", LIMITS)
    assert names_in(tmp_path) == ["set.zip"]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_truncated_archives_are_rejected(share: float, name: str, tmp_path: Path) -> None:
    archive = MAKERS[name](tmp_path / name, GOOD)
    raw = archive.read_bytes()
    archive.write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(DataError, match=f"{name} .*damaged or incomplete"):
        unpack(archive, "set", LIMITS)
    assert names_in(tmp_path) == [name]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    name=st.sampled_from(sorted(MAKERS)),
    changes=st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 255)), min_size=1),
)
def test_corrupted_archives_are_unpacked_or_rejected(name: str, changes: list[tuple[int, int]], tmp_path: Path) -> None:
    """Bytes are changed within the gzip stream, so that its checksum does not catch everything; each archive either
    unpacks or is rejected."""
    archive = MAKERS[name](tmp_path / name, GOOD)
    raw = bytearray(archive.read_bytes() if name.endswith("zip") else gzip.decompress(archive.read_bytes()))
    for place, value in changes:
        raw[place % len(raw)] = value
    archive.write_bytes(raw if name.endswith("zip") else gzip.compress(raw, 1))
    with contextlib.suppress(DataError):
        unpack(archive, "set", LIMITS)
        for file in sorted((tmp_path / "set").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        (tmp_path / "set").rmdir()
    archive.unlink()
    assert names_in(tmp_path) == []


def test_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar(tmp_path / "set.tar.gz", GOOD)
    real_open = Path.open

    def full(self: Path, mode: str = "r", *arguments: object, **options: object) -> object:
        if mode == "xb":
            raise OSError(28, "No space left on device")
        return real_open(self, mode, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DataError, match="no space left on disk; fix that, or choose another directory with --data"):
        unpack(archive, "set", LIMITS)
    assert names_in(tmp_path) == ["set.tar.gz"]
