"""The files under results/: tables agree with the runs beside them, and the overview is up to date."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from filling.overview import overview
from filling.places import fill_places, look_up
from filling.studies import Studies, describe_seeds

from steppe.cli.main import build_parser
from steppe.experiments.config import RunConfig
from steppe.experiments.run_directory import read_result
from steppe.experiments.study import write_plan, write_tables
from steppe.results.schema import RunResult
from steppe.results.tables import as_json, latex, markdown

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("table.json")), ids=lambda file: str(file.parent.name))
def test_tables_agree_with_the_runs(file: Path) -> None:
    table = json.loads(file.read_text(encoding="utf-8"))
    runs = [file.parent / row["method"] / f"seed-{seed}" for row in table["rows"] for seed in row["seeds"]]
    results = [read_result(run) for run in runs]
    made = json.loads(as_json(results, table["command"]))
    assert {key: made[key] for key in ("benchmark", "full_length", "versions", "rows")}.items() <= table.items()
    assert (file.parent / "table.md").read_text(encoding="utf-8") == markdown(results)
    assert (file.parent / "table.tex").read_text(encoding="utf-8") == latex(results)


def write_study(out: Path, benchmark: str, methods: list[str], seeds: int, *changes: str, **given: object) -> None:
    """A study as `steppe` leaves it, with the numbers of one real result in every run."""
    real = json.loads((RESULTS / "pmnist" / "er" / "seed-0" / "result.json").read_text(encoding="utf-8"))
    results = []
    for method in methods:
        for seed in range(seeds):
            config = RunConfig.make(benchmark, method, changes, seed=seed)
            described = {"benchmark": benchmark, "method": method, "seed": seed, "command": config.command()}
            length = {"full_length": config.is_canonical, "config": config.as_dict()}
            told = {**real, **described, **length, **given}
            written = {key: value for key, value in told.items() if value is not None}
            results.append(RunResult.from_dict(written))
            run = out / method / f"seed-{seed}"
            run.mkdir(parents=True)
            (run / "result.json").write_text(json.dumps(written), encoding="utf-8")
    write_tables(out, results, f"steppe study {benchmark} {' '.join(methods)} --seeds {seeds}")


def state(results: Path, name: str) -> str:
    page = overview(results)
    (line,) = [line for line in page.splitlines() if line.startswith(f"| [`{name}`]")]
    return line.split("|")[-2].strip()


def test_only_full_studies_are_complete(tmp_path: Path) -> None:
    write_study(tmp_path / "k-study" / "ascent-steps-1", "pmnist", ["fs-dgpm"], 5, "ascent_steps=1")
    write_study(tmp_path / "k-study" / "ascent-steps-2", "pmnist", ["fs-dgpm"], 5)
    write_study(tmp_path / "k-study" / "ascent-steps-3", "pmnist", ["fs-dgpm"], 5, "ascent_steps=3")
    assert state(tmp_path, "k-study") == "complete"
    assert "in `ascent-steps-3` `method.ascent_steps=3`" in overview(tmp_path)
    assert "$ steppe reproduce k-study\n" in overview(tmp_path)
    shutil.rmtree(tmp_path / "k-study" / "ascent-steps-3" / "fs-dgpm" / "seed-4")
    assert state(tmp_path, "k-study") == "full length; missing: seed 4 of `fs-dgpm` in `ascent-steps-3`"
    shutil.rmtree(tmp_path / "k-study" / "ascent-steps-3")
    assert state(tmp_path, "k-study") == "full length; missing: `fs-dgpm` in `ascent-steps-3`"


def test_shortened_and_changed_studies_are_named(tmp_path: Path) -> None:
    shorter = ("benchmark.tasks=4", "training.epochs=5")
    write_study(tmp_path / "short", "cifar100-superclass", ["fs-dgpm", "er"], 1, *shorter)
    short = "shortened: `benchmark.tasks=4`, `training.epochs=5`"
    assert state(tmp_path, "short") == f"{short}; missing: `fs-sgpm`, `gpm`"
    assert "(`steppe reproduce superclass-table`)" in overview(tmp_path)
    write_study(tmp_path / "scrambled", "cifar100-superclass", ["fs-dgpm"], 1, "reading=scrambled")
    assert Studies.read(tmp_path / "scrambled").recipe == "superclass-scrambled"
    write_study(tmp_path / "nudged", "pmnist", ["er"], 2, "method.lr=0.02")
    assert state(tmp_path, "nudged") == "full length; other settings: `method.lr=0.02`"
    write_study(tmp_path / "older", "pmnist", ["er"], 2, "method.lr=0.02", command="steppe run pmnist er --seed 0")
    assert state(tmp_path, "older") == "full length; older presets: `method.lr=0.02`"


def test_machines_and_commits_with_their_runs(tmp_path: Path) -> None:
    write_study(tmp_path / "study", "split-mnist", ["er"], 2, machine=None)
    file = tmp_path / "study" / "er" / "seed-0" / "result.json"
    changed = json.loads(file.read_text(encoding="utf-8"))
    changed["machine"] = {"processor": "an abacus", "cores": 3}
    changed["versions"]["commit"] = "0123456789+changes"
    file.write_text(json.dumps(changed), encoding="utf-8")
    page = overview(tmp_path)
    assert "**Machine:** an abacus, 3 cores (1 run), machine not recorded (1 run)." in page
    assert "`0123456+changes` (1 run), " in page


def test_unfinished_study_is_listed(tmp_path: Path) -> None:
    write_study(tmp_path / "study", "split-mnist", ["er"], 1)
    for name in ("table.json", "table.md", "table.tex"):
        (tmp_path / "study" / name).unlink()
    write_plan(tmp_path / "study", [], "steppe study split-mnist er gpm --seeds 3")
    assert "$ steppe study split-mnist er gpm --seeds 3\n" in overview(tmp_path)


def test_the_commands_of_the_overview_can_be_parsed() -> None:
    commands = [line[2:] for line in overview(RESULTS).splitlines() if line.startswith("$ ")]
    assert len(commands) >= len(list(RESULTS.glob("*/table.json")))
    for command in commands:
        assert build_parser().parse_args(command.split()[1:]).action


@pytest.mark.parametrize(
    ("seeds", "words"),
    [([3], "seed 3"), ([0, 1], "seeds 0 and 1"), ([1, 2, 3], "seeds 1 to 3"), ([0, 2], "seeds 0, 2")],
)
def test_seeds_in_words(seeds: list[int], words: str) -> None:
    assert describe_seeds(seeds) == words


def test_single_values_and_differences() -> None:
    table = "results/pmnist/table.json"
    er, gpm = (look_up(f"{table}#rows.{method}.acc.mean") for method in ("er", "gpm"))
    assert fill_places(f"<!-- result: {table}#rows.er.acc.mean -->0.0<!-- end -->!").endswith(
        f"-->{er:.1f}<!-- end -->!"
    )
    for other in (f"{table}#rows.er.acc.mean", "#rows.er.acc.mean"):
        place = f"<!-- result: {table}#rows.gpm.acc.mean - {other} -->"
        assert fill_places(f"{place}9<!-- end --> points") == f"{place}{gpm - er:.0f}<!-- end --> points"
    assert look_up("src/steppe/results/published.toml#pmnist.er.paper.acc.0") == 68.31
    with pytest.raises(StopIteration):
        look_up(f"{table}#rows.nothing.acc.mean")
