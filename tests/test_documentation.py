"""The code shown to readers runs as it stands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from steppe.cli import _parser, main
from steppe.figures import FIGURES
from steppe.registry import BENCHMARKS, METHODS

ROOT = Path(__file__).parents[1]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def test_main_job_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's ten lines, shortened in nothing but the number of tasks and samples."""
    main_job = python_blocks("README.md")[0]
    shortened = main_job.replace("steppe.PMNIST()", "steppe.PMNIST(tasks=2, samples=100, test_samples=500)")
    assert shortened != main_job
    exec(compile(shortened, "README.md", "exec"), {})
    assert re.fullmatch(r"ACC \d+\.\d\d  BWT -?\d+\.\d\d\n", capsys.readouterr().out)
    assert len([line for line in main_job.splitlines() if line.strip()]) <= 12


def test_own_model_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(python_blocks("README.md")[1], "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_method_in_one_file(tmp_path: Path) -> None:
    plugin = tmp_path / "anchor.py"
    plugin.write_text(python_blocks("CONTRIBUTING.md")[0], encoding="utf-8")
    sets = ["--set", "tasks=2", "--set", "benchmark.samples=50", "--set", "test_samples=100"]
    try:
        assert main(["run", "pmnist", "anchor", "--plugin", str(plugin), *sets, "--out", str(tmp_path / "out")]) == 0
    finally:
        METHODS.pop("anchor", None)
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert result["config"]["method"]["pull"] == 0.05


def test_a_benchmark_in_one_file(tmp_path: Path) -> None:
    plugin = tmp_path / "odd_even.py"
    plugin.write_text(python_blocks("CONTRIBUTING.md")[1], encoding="utf-8")
    arguments = ["run", "odd-even", "er", "--plugin", str(plugin), "--set", "benchmark.samples=50"]
    try:
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    finally:
        BENCHMARKS.pop("odd-even", None)
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert len(result["accuracy"]) == 2


DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_every_method_has_a_page() -> None:
    index = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    for method in METHODS:
        assert f"`{method}`" in index


def test_numbers_in_documents_come_from_results() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fill_results.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"out of date, run scripts/fill_results.py: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/landscapes.md", "docs/figures.md"])
def test_commands_shown_can_be_parsed(name: str) -> None:
    """Every command line of steppe's that a reader may copy."""
    text = (ROOT / name).read_text(encoding="utf-8")
    shown = re.findall(r"^\$ (steppe [^#\n]+)", text, re.MULTILINE) + re.findall(r"`(steppe [a-z]+ [^`]+)`", text)
    assert shown
    for line in shown:
        assert _parser().parse_args(shlex.split(line.replace("\n", " "))[1:]).action


def test_every_figure_is_in_its_table() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "figures.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(FIGURES)
