"""`steppe data` and its parts: the data directory, fetching, verifying, locating."""

from __future__ import annotations

import errno
import hashlib
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest
from local_server import Server, asked_from, send
from small_cifar100 import PARTS, binary, pack, write_folder

from steppe.cli.main import build_parser, main
from steppe.data import catalogue as sets
from steppe.data import cifar100, store
from steppe.data.catalogue import DATA_SETS, Archive
from steppe.data.directory import data_directory
from steppe.errors import DataError


def archive_like(known: Archive, path: Path, *urls: str) -> Archive:
    """A catalogue entry for an archive of the test's."""
    raw = path.read_bytes()
    md5, sha256 = hashlib.md5(raw).hexdigest(), hashlib.sha256(raw).hexdigest()
    return replace(known, size=len(raw), md5=md5, sha256=sha256, urls=urls)


@pytest.fixture
def served(small_cifar100: Path, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path_factory) -> bytes:
    """A small CIFAR-100's archive, in the catalogue and on a local server, and an empty data directory."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    outside = tmp_path_factory.mktemp("publisher")
    packed = pack(write_folder(outside, {name: binary(*part) for name, part in PARTS.items()}))
    raw = packed.read_bytes()
    known = DATA_SETS["cifar-100"].archive
    assert known is not None
    archive = archive_like(known, packed, server.url(f"/{packed.name}"))
    server.answers[f"/{packed.name}"] = lambda handler: send(handler, raw, asked_from(handler))
    monkeypatch.setitem(sets.DATA_SETS, "cifar-100", replace(DATA_SETS["cifar-100"], archive=archive))
    return raw


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


BINARY = "cifar-100-binary.tar.gz"


def test_fetch(served: bytes, small_cifar100: Path, server: Server) -> None:
    lines: list[str] = []
    assert store.describe_status("cifar-100").startswith("not there")
    assert store.fetch("cifar-100", report=lines.append) == small_cifar100 / "cifar-100-binary"
    assert names_in(small_cifar100) == ["cifar-100-binary"]
    assert any("free for research" in line for line in lines)
    assert store.describe_status("cifar-100") == "there"
    assert len(cifar100.load().select("train")[0]) == 200
    store.fetch("cifar-100", report=lines.append)
    assert "already" in lines[-1]
    assert len(server.asked) == 1


def test_existing_archive_is_used_and_kept(served: bytes, small_cifar100: Path, server: Server) -> None:
    (small_cifar100 / BINARY).write_bytes(served)
    assert store.describe_status("cifar-100") == "there (packed)"
    assert store.fetch("cifar-100").name == "cifar-100-binary"
    assert names_in(small_cifar100) == ["cifar-100-binary", BINARY]
    assert server.asked == []


def test_damaged_archive_is_fetched_again(served: bytes, small_cifar100: Path, server: Server) -> None:
    (small_cifar100 / BINARY).write_bytes(served[:-1000])
    store.fetch("cifar-100")
    assert names_in(small_cifar100) == ["cifar-100-binary"]
    assert len(server.asked) == 1


def test_a_damaged_folder_is_replaced(served: bytes, small_cifar100: Path) -> None:
    write_folder(small_cifar100, {"train": b"half"})
    assert not store.verify("cifar-100")[0].is_complete
    store.fetch("cifar-100")
    assert store.verify("cifar-100")[0].is_complete


def interrupt_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Interrupt a fetch when it reaches this function of the store."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, name, stop)
        with pytest.raises(KeyboardInterrupt):
            store.fetch("cifar-100")


@pytest.mark.parametrize(("function", "after"), [("unpack", []), ("_check", ["cifar-100-binary"])])
def test_next_fetch_removes_the_download_of_an_interrupted_one(
    function: str,
    after: list[str],
    served: bytes,
    small_cifar100: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt_in(monkeypatch, function)
    assert names_in(small_cifar100) == sorted([*after, f"{BINARY}.part"])
    (small_cifar100 / f"{BINARY}.fresh.part").write_bytes(served[:1000])
    assert store.fetch("cifar-100").name == "cifar-100-binary"
    assert names_in(small_cifar100) == ["cifar-100-binary"]
    assert len(server.asked) == 1


@pytest.mark.parametrize("function", ["unpack", "_check"])
def test_users_archive_is_kept_after_an_interrupted_fetch(
    function: str, served: bytes, small_cifar100: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one of the same name as the download."""
    interrupt_in(monkeypatch, function)
    (small_cifar100 / BINARY).write_bytes(served)
    interrupt_in(monkeypatch, "_check")
    store.fetch("cifar-100")
    assert names_in(small_cifar100) == ["cifar-100-binary", BINARY]
    assert len(server.asked) == 1


def test_complete_set_in_a_read_only_directory(
    served: bytes, small_cifar100: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    lines: list[str] = []
    folder = store.fetch("cifar-100")
    monkeypatch.setattr(store.FileLock, "acquire", refuse)
    assert store.fetch("cifar-100", report=lines.append) == folder
    assert [line for line in lines if "already" in line] == lines
    (folder / "test.bin").write_bytes(b"half")
    with pytest.raises(DataError, match=r"cannot write .*: permission denied"):
        store.fetch("cifar-100")


def test_leftover_that_cannot_be_removed_is_reported(served: bytes, small_cifar100: Path) -> None:
    """Not even root can remove a directory like a file."""
    lines: list[str] = []
    folder = store.fetch("cifar-100")
    (small_cifar100 / f"{BINARY}.part").mkdir()
    (small_cifar100 / "cifar-100-binary.tar.gz.fresh.part").write_bytes(b"half")
    assert store.fetch("cifar-100", report=lines.append) == folder
    assert names_in(small_cifar100) == ["cifar-100-binary", f"{BINARY}.part"]
    assert f"{BINARY}.part is no longer needed but cannot be removed" in lines[-1]


def test_failed_fetch_keeps_existing_files(served: bytes, small_cifar100: Path, server: Server) -> None:
    write_folder(small_cifar100, {"train": b"half"})
    server.answers[f"/{BINARY}"] = lambda handler: handler.send_error(500)
    with pytest.raises(DataError, match=r"(?s)binary.*answered 500"):
        store.fetch("cifar-100")
    assert names_in(small_cifar100) == ["cifar-100-binary"]


def test_only_one_process_fetches_a_set(served: bytes) -> None:
    with store._locked("cifar-100"), pytest.raises(DataError, match="being fetched by another process"):
        store.fetch("cifar-100")
    folder = store.fetch("cifar-100")
    with store._locked("cifar-100"):
        assert store.fetch("cifar-100") == folder  # complete: no need to wait


def test_verify_reports_each_copy(served: bytes, small_cifar100: Path) -> None:
    store.fetch("cifar-100")
    (small_cifar100 / BINARY).write_bytes(served[:-1])
    checks = store.verify("cifar-100")
    assert [(check.path.name, check.is_complete) for check in checks] == [
        ("cifar-100-binary", True),
        (BINARY, False),
    ]
    assert "bytes, expected" in checks[1].text


def test_the_command(served: bytes, small_cifar100: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of `steppe data`, for one data set."""
    place = tmp_path / "new"
    assert main(["data", "fetch", "cifar-100", "--data", str(place)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{place / 'cifar-100-binary'}\n"
    assert "cifar-100: 100 % of" in err
    assert main(["data", "--data", str(place)]) == 0
    assert "cifar-100      there" in capsys.readouterr().out
    assert main(["data", "--data", str(place), "where", "cifar-100"]) == 0
    assert capsys.readouterr().out == f"{place / 'cifar-100-binary'}\n"
    assert main(["data", "verify", "--data", str(place)]) == 0
    out = capsys.readouterr().out
    assert "cifar-100-binary is intact" in out
    assert "tiny-imagenet: not there" in out
    (place / "cifar-100-binary" / "test.bin").write_bytes(b"half")
    assert main(["data", "verify", "cifar-100", "--data", str(place)]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_mnist_is_bundled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "fetch", "mnist"]) == 0
    assert main(["data", "verify", "mnist"]) == 0
    assert "every file has its hash" in capsys.readouterr().out


def test_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPPE_DATA", "~/data")
    assert data_directory() == Path.home() / "data"
    monkeypatch.setenv("STEPPE_DATA", "relative")
    assert data_directory() == Path.cwd() / "relative"
    monkeypatch.delenv("STEPPE_DATA")
    assert data_directory() == platformdirs.user_cache_path("steppe") / "data"


def test_child_processes_use_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_DATA", "other")
    assert main(["data", "where", "--data", str(tmp_path)]) == 0
    script = "import os; print(os.environ['STEPPE_DATA'])"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(tmp_path)


def test_a_folder_with_some_classes_of_tiny_imagenet(tiny_imagenet_data: Path) -> None:
    assert store.describe_status("tiny-imagenet") in ("there", "there (50 of 200 classes)")
    assert store.locate("tiny-imagenet") == tiny_imagenet_data / "tiny-imagenet-200"


def test_the_commands_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\$ (steppe [^#\n]+)", text, re.MULTILINE) + re.findall(r"`(steppe [a-z]+[^`]*)`", text)
    assert len(shown) > 5
    for line in shown:
        assert build_parser().parse_args(shlex.split(line)[1:]).action
    for name in DATA_SETS:
        assert f"`{name}`" in text
