"""What a report reads, combines and averages."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_landscape, write_run

from steppe.errors import RunError, UsageError
from steppe.experiments.run_directory import read_result
from steppe.report.differences import default_reference, difference_rows
from steppe.report.finished_run import Collection, FinishedRun, collect
from steppe.report.page import render_page, write_page
from steppe.report.sections import Section, build_sections
from steppe.report.series import section_series
from steppe.results.statistics import TOO_FEW

RESULTS = Path(__file__).parents[2] / "results"


def only_section(directory: Path) -> Section:
    found = build_sections(collect([directory]))
    assert len(found) == 1
    return found[0]


def test_every_finished_run_once_and_unfinished_ones_named(tmp_path: Path) -> None:
    write_run(tmp_path / "study" / "er" / "seed-0")
    (tmp_path / "study" / "er" / "seed-1").mkdir()
    (tmp_path / "study" / "er" / "seed-1" / "config.toml").write_text("", encoding="utf-8")
    (tmp_path / "study" / "table.json").write_text(
        '{"benchmark": "pmnist", "command": "steppe study"}', encoding="utf-8"
    )
    found = collect([tmp_path / "study", tmp_path / "study" / "er" / "seed-0"])
    assert [run.name for run in found.runs] == ["study/er/seed-0"]
    assert found.unfinished == [tmp_path / "study" / "er" / "seed-1"]
    assert [study.command for study in found.studies] == ["steppe study"]
    assert found.runs[0].log.names == {0: "first", 1: "second", 2: "third"}
    assert found.runs[0].log.diagnostics[1]["ranks"]["first.weight"] == {"rank": 20, "of": 100}


def test_directories_without_runs_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no runs"):
        collect([tmp_path])
    with pytest.raises(UsageError, match="is not a directory"):
        collect([tmp_path / "missing"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("accuracy", [[1.0, 2.0]]),
        ("accuracy", "high"),
        ("acc", None),
        ("acc", float("nan")),
        ("config", {}),
        ("per_task", ["odd"] * 3),
        ("per_task", [{"seconds": 1, "bytes": {}, "updates": 1}]),
        ("method", 3),
    ],
)
def test_invalid_result_fields_are_named(tmp_path: Path, key: str, value: object) -> None:
    write_run(tmp_path / "er", **{key: value} if key not in ("method",) else {})
    if key == "method":
        result = json.loads((tmp_path / "er" / "result.json").read_text(encoding="utf-8"))
        (tmp_path / "er" / "result.json").write_text(json.dumps({**result, key: value}), encoding="utf-8")
    with pytest.raises(RunError, match=f"er.*'{key}'"):
        collect([tmp_path])


def test_unreadable_log_lines_are_skipped(tmp_path: Path) -> None:
    write_run(tmp_path / "er")
    log = tmp_path / "er" / "log.jsonl"
    log.write_text("not json\n[]\n" + log.read_text(encoding="utf-8") + '{"event": "TaskEn', encoding="utf-8")
    assert len(collect([tmp_path]).runs[0].log.names) == 3
    log.unlink()
    assert collect([tmp_path]).runs[0].log.names == {}
    assert only_section(tmp_path).tasks == ["", "", ""]


def test_invalid_log_entries_are_not_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "er")
    ranks = {"a": 3, "b": {"rank": "high", "of": 9}, "c": {"rank": 10**400, "of": 9}, "d": {"rank": True, "of": 9}}
    told = {"ranks": ranks, "importances": {"a": {"deciles": ["x"] * 11}}}
    event = {"event": "TaskEnded", "task": 0, "name": "first", "method": told}
    (tmp_path / "er" / "log.jsonl").write_text(json.dumps(event), encoding="utf-8")
    method = section_series(only_section(tmp_path))["methods"][0]
    assert method["layers"] == []
    assert method["seconds"]["all"] == [2.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (["a\ud800b", "two\nlines", 7, None, "\x1b"], ["ab", "two lines"]),
        (7, []),
        ("text", []),
        ({"a": 1}, []),
        (None, []),
    ],
)
def test_invalid_log_remarks_are_ignored(told: object, kept: list[str], tmp_path: Path) -> None:
    write_run(tmp_path / "er")
    event = {"event": "TaskEnded", "task": 0, "name": "cats\udcff", "remarks": told}
    (tmp_path / "er" / "log.jsonl").write_text(json.dumps(event), encoding="utf-8")
    (run,) = collect([tmp_path]).runs
    assert run.remarks == kept
    assert run.log.names == {0: "cats"}
    render_page(collect([tmp_path]), "steppe report").encode()


def test_names_that_are_not_utf_8_reach_the_page(tmp_path: Path) -> None:
    study = tmp_path / os.fsdecode(b"study-\xff")
    try:
        write_run(study / "er")
    except OSError:
        pytest.skip("this file system takes no such names")
    (study / "er" / "landscape.json").write_text("{}", encoding="utf-8")  # its remark names the file
    (study / "table.json").write_text(json.dumps({"benchmark": "pmnist", "command": "a\udcff"}), encoding="utf-8")
    (study / "broken-off").mkdir()
    (study / "broken-off" / "config.toml").write_text("", encoding="utf-8")
    write_page(collect([study]), tmp_path / "report.html", f"steppe report {study}")
    assert "landscape is left out" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "given",
    [{"format": 2}, {"profiles": {}}, {"profiles": {"1": {"1": [[1.0]]}}}, {"settings": {}}],
)
def test_unreadable_landscape_is_left_out_with_a_remark(tmp_path: Path, given: dict[str, object]) -> None:
    write_run(tmp_path / "er")
    write_landscape(tmp_path / "er", **given)
    run = collect([tmp_path]).runs[0]
    assert run.usable_landscape is None
    assert "landscape" in run.remarks[0]
    assert "left out" in run.remarks[0]
    assert section_series(only_section(tmp_path))["landscape"] is None


def test_numbers_are_averaged_over_seeds(tmp_path: Path) -> None:
    results = [write_run(tmp_path / f"seed-{seed}", seed=seed) for seed in range(3)]
    method = section_series(only_section(tmp_path))["methods"][0]
    for after in range(3):
        seen = [statistics.fmean(result["accuracy"][after][: after + 1]) for result in results]
        assert method["seen"]["mean"][after] == pytest.approx(statistics.fmean(seen), rel=1e-4)
        assert method["seen"]["std"][after] == pytest.approx(statistics.stdev(seen), rel=1e-4)
        for task in range(after + 1):
            entries = [result["accuracy"][after][task] for result in results]
            assert method["matrix"][after]["mean"][task] == pytest.approx(statistics.fmean(entries), rel=1e-4)
            assert method["matrix"][after]["std"][task] == pytest.approx(statistics.stdev(entries), rel=1e-4)
    assert method["matrix"][0]["mean"][1:] == [None, None]
    assert method["seconds"]["kinds"] == ["train", "evaluate", "memory"]
    assert method["seconds"]["all"] == [3.0, 0.5, 0.25]  # training: 2, 3 and 4 s for each task
    assert method["bytes"]["stages"][1] == {"task": 1, "values": [1000.0, 200.0]}
    layer = method["layers"][0]
    assert layer["rank"] == [11.0, 21.0, 31.0]
    assert layer["of"] == 100
    assert layer["deciles"][0] is None
    assert layer["deciles"][1] == pytest.approx([(number + 1) / 20 for number in range(11)])


def test_tasks_learned_jointly_have_one_point(tmp_path: Path) -> None:
    nothing = [None] * 3
    stage = [{"seconds": {"train": 6.0}, "bytes": {"replay": 0}, "updates": 1}]
    write_run(
        *(tmp_path / "together", "multitask"),
        **{
            "bwt": None,
            "accuracy": [nothing, nothing, [80.0, 81.0, 85.0]],
            "per_task": stage,
            "seconds": {"train": 6.0, "evaluate": 0.0, "memory": 0.0},
        },
    )
    method = section_series(only_section(tmp_path))["methods"][0]
    assert method["seen"]["mean"] == [None, None, 82.0]
    assert method["seconds"]["all"] == [2.0, 0.0, 0.0]
    assert method["seconds"]["stages"] == [{"task": 2, "values": [6.0, 0.0, 0.0]}]


def test_other_settings_are_another_method(tmp_path: Path) -> None:
    write_run(tmp_path / "small", settings={"buffer": 200})
    write_run(tmp_path / "large", settings={"buffer": 500}, changes=" --set method.buffer=500", lift=1)
    write_run(tmp_path / "old", seed=1)  # from before the setting existed
    found = only_section(tmp_path)
    assert [(each.label, each.seeds) for each in found.variants] == [
        ("er (buffer=500)", [0]),
        ("er (buffer=200)", [0, 1]),
    ]
    assert found.variants[0].changes == {"method.buffer": "500"}


def test_other_tasks_are_another_section(tmp_path: Path) -> None:
    write_run(tmp_path / "long")
    write_run(tmp_path / "short", tasks=("one", "two"), changes=" --set benchmark.tasks=2")
    write_run(tmp_path / "other", benchmark="split-mnist")
    found = build_sections(collect([tmp_path]))
    assert [section.title for section in found] == ["pmnist (tasks=3)", "pmnist (tasks=2)", "split-mnist"]
    assert found[1].changes == {"benchmark.tasks": "2"}


def test_a_seed_found_twice_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", lift=5)
    found = only_section(tmp_path)
    assert found.variants[0].seeds == [0]
    assert f"{tmp_path.name}/b is left out" in found.remarks[0]


def test_names_that_depend_on_the_seed_are_not_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seed=0, tasks=("cats", "dogs"))
    write_run(tmp_path / "1", seed=1, tasks=("cats", "birds"))
    assert only_section(tmp_path).tasks == ["cats", ""]


def test_remarks_name_their_runs_unless_they_hold_for_all(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seed=0, remarks=["easy.", "odd."])
    write_run(tmp_path / "1", seed=1, remarks=["easy."])
    assert only_section(tmp_path).remarks == ["easy.", f"{tmp_path.name}/0: odd."]


def test_differences_are_taken_from_the_best_that_learns_in_order(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"er-{seed}", "er", seed)
        write_run(tmp_path / f"better-{seed}", "better", seed, lift=1 + seed / 10)
        write_run(tmp_path / f"together-{seed}", "together", seed, lift=5 + seed, bwt=None)
    write_run(tmp_path / "lone", "lone", 7, lift=-3)
    found = only_section(tmp_path)
    assert [each.label for each in found.variants] == ["together", "better", "er", "lone"]
    assert default_reference(found) == 1
    for seed in range(3):  # sees every earlier task again, but has a BWT
        write_run(tmp_path / f"oracle-{seed}", "oracle", seed, lift=9 + seed)
    with_oracle = only_section(tmp_path)
    assert [each.label for each in with_oracle.variants][:3] == ["oracle", "together", "better"]
    assert default_reference(with_oracle) == 2
    for seed in range(3):  # a plugin's, which declares it
        write_run(tmp_path / f"own-{seed}", "own", seed, lift=20 + seed, schedule="retrain")
    with_own = only_section(tmp_path)
    assert [each.label for each in with_own.variants][:4] == ["own", "oracle", "together", "better"]
    assert default_reference(with_own) == 3
    rows = {row.label: row for row in difference_rows(found, 1)}
    assert list(rows) == ["together", "er", "lone"]
    (acc, p), (bwt, _) = rows["er"].comparisons
    assert acc.mean == pytest.approx(-1.1)
    assert acc.p is not None
    assert p == pytest.approx(2 * acc.p)  # two comparisons, of which this one is clearer; a single seed is not tested
    assert rows["together"].comparisons[1][0].mean is None
    assert bwt.mean == pytest.approx(0, abs=1e-9)
    assert rows["lone"].comparisons[0][0].reason == TOO_FEW
    assert rows["lone"].cells()[1] == TOO_FEW


def test_landscapes_are_averaged_over_directions_and_seeds(tmp_path: Path) -> None:
    for seed, sharpness in enumerate((1.0, 3.0)):
        write_run(tmp_path / f"seed-{seed}", seed=seed)
        write_landscape(tmp_path / f"seed-{seed}", sharpness=sharpness)
    others = ({"points": 3}, {"radius": 0.1}, {"samples": 20, "seed": 1}, {"range": 2.0})
    for seed, measured in enumerate(others, 2):
        write_run(tmp_path / f"seed-{seed}", seed=seed)
        write_landscape(tmp_path / f"seed-{seed}", sharpness=0.1, measured=measured)
    found = section_series(only_section(tmp_path))["landscape"]
    told = ("points=3", "radius=0.1", "samples=20, seed=1", "range=2.0")
    assert found["left_out"] == [f"{tmp_path.name}/seed-{seed} ({words})" for seed, words in enumerate(told, 2)]
    moment = found["methods"][0]["moments"][1]
    assert (moment["after"], moment["task"]) == (2, 1)
    edges = [0.3 + steep * sharpness * 2 for sharpness in (1.0, 3.0) for steep in (0.5, 1.0)]
    assert moment["mean"][0] == pytest.approx(statistics.fmean(edges), rel=1e-4)
    assert moment["std"][0] == pytest.approx(statistics.stdev(edges), rel=1e-4)
    assert moment["flatness"]["sharpness"] == {"mean": 4.0, "std": pytest.approx(2 * 2**0.5, rel=1e-4)}
    assert moment["flatness"]["hessian"] == {"mean": 12.5, "std": 0.0}


def test_the_flatness_of_a_lone_seed_spreads_over_its_directions(tmp_path: Path) -> None:
    write_run(tmp_path / "seed-0")
    write_landscape(tmp_path / "seed-0")
    found = section_series(only_section(tmp_path))["landscape"]["methods"][0]["moments"][1]
    assert found["flatness"]["sharpness"] == {"mean": 2.0, "std": 0.1}


def test_more_directions_and_the_bounds_settings_leave_no_landscape_out(tmp_path: Path) -> None:
    for seed, measured in enumerate(({}, {"directions": 3, "sigma": 0.1, "delta": 0.5})):
        write_run(tmp_path / f"seed-{seed}", seed=seed)
        write_landscape(tmp_path / f"seed-{seed}", measured=measured)
    assert section_series(only_section(tmp_path))["landscape"]["left_out"] == []


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"method": "gpm"}, {"benchmark": "split-mnist"}, {"settings": {"lr": 1}}]
)
def test_a_landscape_of_another_run_is_left_out_with_a_remark(tmp_path: Path, other: dict[str, Any]) -> None:
    write_run(tmp_path / "one" / "run", **other)
    write_landscape(tmp_path / "one" / "run")
    write_run(tmp_path / "two" / "run")
    shutil.copy(tmp_path / "one" / "run" / "landscape.json", tmp_path / "two" / "run")
    run = collect([tmp_path / "two"]).runs[0]
    assert run.usable_landscape is None
    assert "the landscape of another run" in run.remarks[0]
    assert collect([tmp_path / "one"]).runs[0].landscape is not None


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("seed-*/landscape.json")), ids=lambda file: file.parts[-3])
def test_recorded_landscapes_are_those_of_their_runs(file: Path) -> None:
    assert FinishedRun(file.parent, read_result(file.parent)).landscape is not None


def test_nothing_collected_gives_no_section() -> None:
    assert build_sections(Collection([], [], [])) == []
