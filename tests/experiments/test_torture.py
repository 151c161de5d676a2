"""A short form of `make torture`, which injects a few hundred faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked, which this system cannot do")


def test_torture_loses_nothing(tmp_path: Path) -> None:
    """In its own process: forks of a process that runs tests would inherit its threads' locks."""
    command = [sys.executable, str(Path(__file__).parents[1] / "stress" / "torture.py"), "--kills", "8", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"lost": 0' in done.stdout
    assert '"different": 0' in done.stdout
