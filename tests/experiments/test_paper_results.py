"""Recipes: each one is valid, a small one is executed, and finished parts are not repeated."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from steppe.cli.main import main
from steppe.cli.reproduce import _landscapes
from steppe.experiments.paper_results import RECIPES, Part, Recipe
from steppe.figures import FIGURES
from steppe.registry import METHODS

SHORT = ("benchmark.tasks=2", "benchmark.samples=40", "benchmark.test_samples=50")


RECORDED = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(
    "name", ["fs-er-ablation", "case-study-released", "pmnist-controls", "k-study", "memory-study"]
)
def test_recorded_results_were_made_with_the_recipes_settings(name: str) -> None:
    for part in RECIPES[name].parts:
        told = json.loads((RECORDED / name / part.name / "table.json").read_text(encoding="utf-8"))["command"]
        changed = [change for change in re.findall(r"--set (\S+)", told) if not change.startswith("benchmark.")]
        assert changed == list(part.changes), part.name


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_valid(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    jobs = [job for part in recipe.parts for job in part.jobs(tmp_path, range(recipe.seeds))]
    assert len({job.out for job in jobs}) == len(jobs)
    assert set(recipe.figures) <= FIGURES.keys()
    assert {job.config.method for job in jobs} <= METHODS.keys()


def test_the_documented_recipes_are_up_to_date() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    told = {}
    for names, counts in re.findall(r"^\| (`.*?`) \|.*\| ([\d, ]+) \|$", text, re.MULTILINE):
        told |= dict(zip(re.findall(r"`(.*?)`", names), map(int, counts.split(",")), strict=True))
    assert told == {name: recipe.seeds * sum(len(p.methods) for p in recipe.parts) for name, recipe in RECIPES.items()}


def test_a_small_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parts = (Part("pmnist", "pmnist", ("er", "fs-er"), SHORT),)
    monkeypatch.setitem(
        RECIPES, "small", Recipe("Small.", parts, figures=("landscapes", "memory-size"), landscapes=True)
    )
    command = ["reproduce", "small", "--seeds", "3-3", "--jobs", "1", "--out", str(tmp_path / "out")]
    assert main([*command, "--list"]) == 0
    assert "2 runs, 0 done" in capsys.readouterr().out
    assert main(command) == 0
    told = capsys.readouterr()
    assert "steppe study pmnist er fs-er --seeds 3-3" in told.out
    assert "skipping figure memory-size" in told.err  # a single size is no study of sizes
    made = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"pmnist/table.md", "pmnist/report.html", "pmnist/er/seed-3/landscape.json", "landscapes.pdf"} <= made
    rows = json.loads((tmp_path / "out" / "flatness.json").read_text(encoding="utf-8"))["rows"]
    assert {row["method"] for row in rows} == {"er", "fs-er"}
    assert rows[0]["acc"] >= rows[1]["acc"]
    measured = json.loads((tmp_path / "out/pmnist/er/seed-3/landscape.json").read_text(encoding="utf-8"))["flatness"]
    at_the_end = [measured["2"][task]["sharpness"]["mean"] for task in ("1", "2")]
    (er,) = (row for row in rows if row["method"] == "er")
    assert er["sharpness_at_the_end"] == pytest.approx(sum(at_the_end) / 2)
    results = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")}
    shutil.rmtree(tmp_path / "out/pmnist/er/seed-3/checkpoints")  # the landscapes remain
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in results} == results
    table = (tmp_path / "out/pmnist/table.md").read_text(encoding="utf-8")
    assert main([*command, "--methods", "er"]) == 2  # the table would lose a method
    assert "contains a study that also includes fs-er/seed-3" in capsys.readouterr().err
    assert (tmp_path / "out/pmnist/table.md").read_text(encoding="utf-8") == table


def test_correlations_without_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"method": method, "acc": place, "bwt": -place, "sharpness_at_the_end": place**2}
        for place, method in enumerate(("oracle", "er", "gpm", "fs-dgpm", "finetune"))
    ]
    monkeypatch.setattr("steppe.landscape.rank_correlation.compare_runs", lambda results: rows)
    monkeypatch.setattr("steppe.cli.finished_runs.load_finished_runs", lambda directories: {})
    _landscapes(Recipe("No studies.", ()), tmp_path, 0, "steppe reproduce")
    told = json.loads((tmp_path / "flatness.json").read_text(encoding="utf-8"))
    assert [row["runs"] for row in told["correlations"]] == [5]
    assert [row["runs"] for row in told["correlations_without_bounds"]] == [3]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("reproduce", "missing NAME"),
        ("reproduce pmnist-tabel", "Did you mean 'pmnist-table'"),
        ("reproduce --list pmnist-tabel", "Did you mean 'pmnist-table'"),
        ("reproduce k-study --seeds 0", "0 gives 0"),
        ("reproduce --list --seeds 9-5", "9-5 gives 0"),
        ("reproduce k-study --methods er", "unknown method of this reproduction 'er'"),
        ("reproduce superclass-table --samples 10", "unknown setting of the benchmark 'samples'"),
    ],
)
def test_invalid_recipes_are_rejected_before_any_work(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
