"""Writing files where the user says: through links, and never over a device, pipe or socket."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from made_runs import made_result, write_run

from steppe.cli.main import main
from steppe.errors import RunError, UsageError
from steppe.landscape.measure import _open_landscape
from steppe.landscape.settings import LandscapeSettings
from steppe.runtime.files import explain_write_errors, read_bounded, read_json, write_atomic


def test_links_are_kept_and_their_targets_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link, hop = tmp_path / "there" / "real", tmp_path / "link", tmp_path / "hop"
    link.symlink_to("there/real")
    hop.symlink_to(link)
    for path, content in (
        (link, b"new"),
        (hop, b"newer"),
        (real, b"newest"),
    ):  # the first link's target does not exist yet
        write_atomic(path, content)
        assert real.read_bytes() == content
    assert link.is_symlink()
    assert hop.is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["hop", "link", "real", "there"]


def test_temporary_file_is_beside_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link may point to another file system, to which a file cannot be renamed."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/real")
    moved: list[tuple[Path, Path]] = []
    monkeypatch.setattr(Path, "replace", lambda draft, target: moved.append((draft, target)))
    write_atomic(tmp_path / "link", b"new")
    assert moved == [(tmp_path / "there" / ".real.part", tmp_path / "there" / "real")]


@pytest.mark.parametrize("pipe", [False, True])
def test_existing_temporary_file_is_not_written_to(pipe: bool, tmp_path: Path) -> None:
    draft, precious = tmp_path / ".real.part", tmp_path / "precious"
    precious.write_bytes(b"precious")
    if pipe:
        os.mkfifo(draft)
        reader = os.open(draft, os.O_RDONLY | os.O_NONBLOCK)  # otherwise it would wait for one
    else:
        draft.symlink_to(precious)
    write_atomic(tmp_path / "real", b"new")
    assert (tmp_path / "real").is_file()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert precious.read_bytes() == b"precious"
    assert not draft.exists()
    if pipe:
        os.close(reader)


def test_endless_file_is_not_read() -> None:
    with pytest.raises(OSError, match="it is a device, not a file"):
        read_bounded(Path("/dev/zero"))


def test_files_are_read_up_to_their_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == read_bounded(tmp_path / "file", None) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_bounded(tmp_path / "file", 4)


def test_json_round_trip(tmp_path: Path) -> None:
    """With brackets and quotes in its strings, and a byte order mark."""
    value = {"a": ["[" * 500, '\\"{{', "ü\u2028"], "b": [[[1.5, None]], {}], "c": "\\"}
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=False).encode())
    assert read_json(tmp_path / "file") == value


def test_circular_links_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with (
        pytest.raises(RunError, match=r"cannot write .*a: Too many levels of symbolic links"),
        explain_write_errors(tmp_path / "a"),
    ):
        write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("linked", [False, True])
def test_devices_and_pipes_are_not_replaced(linked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    path = tmp_path / "link.png" if linked else pipe
    if linked:
        path.symlink_to(pipe)
    run = write_run(tmp_path / "run", made_result())
    commands = [["report", str(run.path), "-o", str(path)]]
    if pytest.importorskip("matplotlib"):
        commands.append(["figures", "matrix", str(run.path), "-o", str(path)])
    for command in commands:
        assert main(command) == 2
        told = capsys.readouterr()
        assert told.err == f"steppe: {path} is a device, pipe or socket, not a file; choose another name.\n"
        assert told.out == ""
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("resume", [False, True])
def test_landscape_rejects_a_pipe_as_output(resume: bool, tmp_path: Path) -> None:
    """It is not read from either, which would never end."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is a device, pipe or socket"):
        _open_landscape(tmp_path / "pipe", [{}], LandscapeSettings(), "", resume)
