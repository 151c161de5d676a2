"""A short form of what `make torture` does to the workers of studies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="workers are found by /proc")
def test_killed_workers_are_reported_and_the_study_ends(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "stress" / "torture_workers.py"),
        "--kills",
        "6",
        "--seed",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"hung": 0' in done.stdout
    assert '"unnamed": 0' in done.stdout
