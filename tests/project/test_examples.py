"""Every script in examples/ runs as it is, in seconds, and prints sensible results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def run_example(name: str, directory: Path) -> str:
    """Run a script in a directory, on one thread, and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_examples_are_listed() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", text, re.MULTILINE)) == [script.name for script in SCRIPTS]
    for page in re.findall(r"\]\((\.\./[^)]+)\)", text):
        assert (ROOT / "examples" / page).is_file(), page


def test_own_model(tmp_path: Path) -> None:
    *rows, _ = run_example("own_model", tmp_path).splitlines()
    accuracies = [float(value) for value in rows[-1].rpartition("accuracy ")[2].split()]
    assert len(accuracies) == 5
    assert min(accuracies) > 85


def test_own_data(tmp_path: Path) -> None:
    out = run_example("own_data", tmp_path)
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+) %", out)]
    assert len(accuracies) == 3
    assert min(accuracies) > 80


def test_own_loop(tmp_path: Path) -> None:
    plain, protected = (
        [float(value) for value in values.split()]
        for values in re.findall(r"accuracy ([\d. ]+)", run_example("own_loop", tmp_path))
    )
    assert len(plain) == len(protected) == 4
    assert protected[0] > plain[0] + 3
    assert min(protected) > min(plain)


def test_compare_methods(tmp_path: Path) -> None:
    rows = [line.split() for line in run_example("compare_methods", tmp_path).splitlines()[1:]]
    acc, bwt = ({name: float(row[place]) for name, *row in rows} for place in (0, 1))
    assert list(acc) == ["Finetune", "ER", "GPM", "FS-DGPM"]
    assert min(acc, key=lambda name: acc[name]) == "Finetune"
    assert min(bwt, key=lambda name: bwt[name]) == "Finetune"


def test_keep_learning(tmp_path: Path) -> None:
    out = run_example("keep_learning", tmp_path)
    assert "saved after 2 tasks" in out
    assert "same weights as without interruption: True" in out


def test_plot_forgetting(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    finetune, fs_dgpm = (
        float(value) for value in re.findall(r"falls by (-?[\d.]+) points", run_example("plot_forgetting", tmp_path))
    )
    assert finetune > fs_dgpm + 5
    assert (tmp_path / "forgetting.png").read_bytes()[:4] == b"\x89PNG"
