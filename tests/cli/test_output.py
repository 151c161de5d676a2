"""Standard output that cannot be written: a one-line error, and finished work is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import made_result, write_run

FULL = Path("/dev/full")
TOLD = "steppe: cannot write to standard output: no space left on disk; free some space or redirect the output.\n"


def steppe(*words: str, into: int, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "steppe", *words]
    return subprocess.run(command, stdout=into, stderr=subprocess.PIPE, text=True, env=environment, check=False)


@pytest.fixture
def full() -> Iterator[int]:
    if not FULL.exists():
        pytest.skip("there is no /dev/full")
    descriptor = os.open(FULL, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["list", "show run", "show study"])
def test_a_full_disk_is_one_line_of_error(command: str, unbuffered: str, full: int, tmp_path: Path) -> None:
    """Whether the first write fails, one in the middle, or the last."""
    write_run(tmp_path / "run", made_result())
    for number in range(300):  # a table larger than a buffer
        write_run(tmp_path / "study" / str(number), made_result(f"method-{number}"))
    name, *place = command.split()
    done = steppe(name, *(str(tmp_path / each) for each in place), into=full, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (1, TOLD)


def test_a_finished_run_is_kept(full: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = [word for change in ("samples=20", "test_samples=20", "tasks=2") for word in ("--set", change)]
    done = steppe("run", "pmnist", "finetune", *changes, "--out", str(out), into=full)
    assert done.returncode == 1
    assert done.stderr.endswith(f"\n{TOLD}")
    assert done.stderr.count("cannot write") == 1
    assert {"result.json", "report.html"} <= {path.name for path in out.iterdir()}


def test_other_errors_are_reported_alone(full: int, tmp_path: Path) -> None:
    done = steppe("show", str(tmp_path), into=full)
    assert (done.returncode, done.stderr) == (2, f"steppe: {tmp_path} contains no runs; there is nothing to show.\n")


def test_a_closed_pipe_is_not_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = steppe("list", into=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
