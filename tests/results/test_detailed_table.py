"""The table of details, against numbers computed by hand from synthetic runs."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_result
from report_runs import write_run

from steppe.cli.main import main
from steppe.experiments.run_directory import read_result
from steppe.results.detailed_table import details


def detailed(runs: Iterable[Path]) -> str:
    return details({path: read_result(path) for path in runs})


def replace_last_record(path: Path, method: Any) -> None:
    """Replace the log's record of the last task."""
    log = path / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), "method": method})
    log.write_text("\n".join(lines), encoding="utf-8")


def recorded(rank: int, mean: float, first_decile: float) -> dict[str, Any]:
    deciles = [0.0, first_decile, *[1.0] * 9]
    return {
        "ranks": {"first": {"rank": rank, "of": 30}, "second": {"rank": 2, "of": 8}},
        "importances": {"first": {"mean": mean, "deciles": deciles}, "second": {"mean": 1.0, "deciles": [1.0] * 11}},
    }


def table(text: str) -> dict[str, dict[str, str]]:
    head, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def test_means_over_seeds_of_everything(tmp_path: Path) -> None:
    runs = {tmp_path / f"{seed}": write_run(tmp_path / f"{seed}", "fs-sgpm", seed) for seed in range(2)}
    replace_last_record(tmp_path / "0", recorded(10, 0.5, 0.3))
    replace_last_record(tmp_path / "1", recorded(13, 0.7, 0.4))
    row = table(detailed(runs))["fs-sgpm"]
    values = [result["learning_acc"] for result in runs.values()]
    assert row["learning accuracy"] == f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert row["ranks"] == "12/30, 2/8"
    assert row["λ"] == "0.800"  # of 0.75 and 0.85
    assert row["λ, first decile"] == "0.350"
    assert row["s / task"] == "2.75"  # 2 and 3 for training, 0.25 for the memory
    assert (row["kB kept"], row["kB working"]) == ("1", "0")  # 1,000 bytes of replay, 200 of bases
    assert row["seeds"] == "2"


def test_runs_are_averaged_only_where_they_differ_in_their_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `steppe run` leaves them, side by side."""
    made = [
        made_result("er", 0, level=80, buffer=50),
        made_result("er", 1, level=80, buffer=50),
        made_result("er", 0, level=60, buffer=200),
        made_result("er", 0, level=80, buffer=50),  # the same again
        made_result("gpm", 0, level=70),
        made_result("gpm", 1, level=70, tasks=2),
    ]
    for number, result in enumerate(made):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    names = ["er (buffer=50)", "er (buffer=200)", "gpm (tasks=3)", "gpm (tasks=2)"]
    for option in ([], ["--details"]):
        assert main(["show", str(tmp_path), *option]) == 0
        text = capsys.readouterr().out
        found = table(text)
        assert list(found) == names
        assert [row["seeds"] for row in found.values()] == ["2", "1", "1", "1"]
        both = [made[0]["acc"], made[1]["acc"]]
        assert found[names[0]]["ACC"] == f"{statistics.fmean(both):.2f} ± {statistics.stdev(both):.2f}"
        assert found[names[1]]["ACC"] == f"{made[2]['acc']:.2f}"
        assert "1 run(s) left out: a run with the same settings and seed" in text


def test_values_just_below_one_are_not_shown_as_one(tmp_path: Path) -> None:
    runs = {tmp_path / "run": write_run(tmp_path / "run", "fs-dgpm")}
    for mean, shown in ((0.999954, "0.99995"), (1.0, "1.000"), (0.9994, "0.999")):
        layers = {"only": {"mean": mean, "deciles": [mean] * 11}}
        replace_last_record(tmp_path / "run", {"importances": layers})
        row = table(detailed(runs))["fs-dgpm"]
        assert (row["λ"], row["λ, first decile"]) == (shown, shown)
        assert "ranks" not in row


@pytest.mark.parametrize(
    "method",
    [
        None,
        5,
        {},
        {"ranks": 3, "importances": [1]},
        {"ranks": {"first": {"rank": "x"}, "b": 1}, "importances": {"first": {"mean": None, "deciles": [1]}}},
    ],
)
def test_missing_or_invalid_log_entries_give_empty_cells(method: Any, tmp_path: Path) -> None:
    runs = {tmp_path / name: write_run(tmp_path / name, name) for name in ("er", "gpm")}
    replace_last_record(tmp_path / "er", method)
    replace_last_record(tmp_path / "gpm", recorded(10, 0.5, 0.3))
    row = table(detailed(runs))["er"]
    assert (row["ranks"], row["λ"], row["λ, first decile"]) == ("", "", "")
    (tmp_path / "er" / "log.jsonl").unlink()
    assert table(detailed(runs))["er"] == row
    (tmp_path / "gpm" / "log.jsonl").unlink()
    assert not {"ranks", "λ", "λ, first decile"} & table(detailed(runs))["er"].keys()  # no method has any


@pytest.mark.parametrize("left", [0, 1, 100])  # the number of bytes left of the last record
def test_truncated_log_does_not_show_another_task(left: int, tmp_path: Path) -> None:
    runs = {tmp_path / name: write_run(tmp_path / name, name) for name in ("fs-dgpm", "fs-sgpm")}
    log = tmp_path / "fs-dgpm" / "log.jsonl"
    *before, last = log.read_bytes().splitlines(keepends=True)
    assert table(detailed(runs))["fs-dgpm"]["ranks"] == "30/100"
    log.write_bytes(b"".join([*before, last[:left]]))
    rows = table(detailed(runs))
    assert [rows["fs-dgpm"][name] for name in ("ranks", "λ", "λ, first decile")] == ["", "", ""]
    assert rows["fs-sgpm"]["ranks"] == "30/100"


def test_published_figures_only_for_canonical_runs(tmp_path: Path) -> None:
    long = {tmp_path / "long": write_run(tmp_path / "long", "er", benchmark="pmnist")}
    short = {tmp_path / "short": write_run(tmp_path / "short", "er", benchmark="pmnist", full_length=False)}
    assert table(detailed(long))["er"]["paper ACC"] == "68.31 ± 0.56"
    assert "paper ACC" not in table(detailed(short))["er"]
    assert "published figures do not apply" in detailed(short)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("er", "gpm"):
        write_run(tmp_path / "study" / method, method)
    assert main(["show", str(tmp_path / "study"), "--details"]) == 0
    assert table(capsys.readouterr().out).keys() == {"er", "gpm"}
    assert main(["show", str(tmp_path / "study" / "er"), "--details"]) == 0
    assert table(capsys.readouterr().out).keys() == {"er"}


def test_several_studies_have_separate_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that differ in more than the seed are not averaged, and a run does not hide those nested in it."""
    top = tmp_path / "top"
    write_run(top, "gpm")
    for study in ("small", "large"):
        for seed in (0, 1):
            write_run(top / study / "er" / f"seed-{seed}", "er", seed)
    assert main(["show", str(top)]) == 0
    assert "gpm" in capsys.readouterr().out.splitlines()[0]
    (top / "result.json").unlink()
    for options in ([], ["--details"]):
        assert main(["show", str(top), *options]) == 0
        replace_last_record = capsys.readouterr().out
        assert replace_last_record.count("| er | 2 |") == 2
        assert f"{top / 'small'}: " in replace_last_record


def test_sibling_runs_share_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, place in enumerate(("mine/one", "mine/two", "yours/one")):
        write_run(tmp_path / place, "er", seed)
    assert main(["show", str(tmp_path)]) == 0
    replace_last_record = capsys.readouterr().out
    assert (replace_last_record.count("| er | 2 |"), replace_last_record.count("| er | 1 |")) == (1, 1)


def test_endless_log_is_not_read(tmp_path: Path) -> None:
    runs = {tmp_path / "er": write_run(tmp_path / "er", "er")}
    (tmp_path / "er" / "log.jsonl").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "er" / "log.jsonl")
    assert "er" in table(detailed(runs))
