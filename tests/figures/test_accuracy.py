"""Figures of accuracies, time and memory: what is plotted, read from the axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import accuracy, made_result, record, together, write_landscape, write_run
from read_back import band

pytest.importorskip("matplotlib")

from steppe.errors import UsageError
from steppe.figures import FIGURES, Choices
from steppe.report.finished_run import FinishedRun

STD = 2**-0.5  # of two values that differ by one


def study(path: Path, methods: tuple[str, ...], seeds: int = 2, **options: Any) -> list[FinishedRun]:
    """Each method is five points above the one before."""
    return [
        write_run(path / method / f"seed-{seed}", made_result(method, seed, level=80 + 5 * place, **options))
        for place, method in enumerate(methods)
        for seed in range(seeds)
    ]


def test_forgetting_shows_the_first_task_and_the_mean_over_tasks_so_far(tmp_path: Path) -> None:
    runs = study(tmp_path, ("er", "gpm"))
    runs.append(write_run(tmp_path / "all", together(made_result("multitask"))))
    first, average = FIGURES["forgetting"].draw(runs).axes
    assert [line.get_label() for line in first.lines] == ["ER", "GPM"]
    assert first.lines[0].get_ydata() == pytest.approx([80.5, 76.5, 72.5])
    assert first.lines[1].get_ydata() == pytest.approx([85.5, 81.5, 77.5])
    assert band(first, 0) == [pytest.approx((y - STD, y + STD)) for y in (80.5, 76.5, 72.5)]
    rows = [[value for value in row if value is not None] for row in accuracy(3, 80.5)]
    assert average.lines[0].get_ydata() == pytest.approx([sum(row) / len(row) for row in rows])
    assert list(average.lines[0].get_xdata()) == [1, 2, 3]


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    first, _ = FIGURES["forgetting"].draw(study(tmp_path, ("er",), seeds=1)).axes
    assert len(first.collections) == 0


def test_comparison_shows_accuracy_time_without_testing_and_memory(tmp_path: Path) -> None:
    runs = study(tmp_path, ("er", "gpm"))
    runs.append(write_run(tmp_path / "all", together(made_result("multitask", level=95))))
    runs.append(write_run(tmp_path / "other", made_result("er", benchmark="split-mnist", tasks=2)))
    curves, time, memory = FIGURES["comparison"].draw(runs).axes
    assert [line.get_label() for line in curves.lines] == ["ER", "GPM", "Multitask"]
    level = runs[4].result.acc
    assert list(curves.lines[2].get_ydata()) == pytest.approx([level, level])
    assert [bar.get_width() for bar in time.patches] == pytest.approx([6.5 / 3, 6.5 / 3, 2.0])
    assert [text.get_text() for text in time.get_yticklabels()] == ["ER", "GPM", "Multitask"]
    assert [bar.get_width() for bar in memory.patches] == pytest.approx([1.5] * 4)
    assert [container.get_label() for container in memory.containers] == ["pmnist", "split-mnist"]


def test_ablation_shows_bars_with_deviations_and_published_marks(tmp_path: Path) -> None:
    runs = study(tmp_path, ("fs-dgpm", "er", "gpm"))
    acc, bwt = FIGURES["ablation"].draw(runs).axes
    assert [text.get_text() for text in acc.get_xticklabels()] == ["GPM", "FS-DGPM"]  # the family, in its order
    means = [sum(run.result.acc for run in runs if run.method == method) / 2 for method in ("gpm", "fs-dgpm")]
    assert [bar.get_height() for bar in acc.patches] == pytest.approx(means)
    own = next(container for container in acc.containers if hasattr(container, "errorbar"))
    whiskers = own.errorbar[2][0].get_segments()
    assert [segment[1][1] - segment[0][1] for segment in whiskers] == pytest.approx([2 * STD, 2 * STD])
    marks = {container.get_label(): container for container in acc.containers if container.get_label()[0] != "_"}
    assert float(marks["released code"][0].get_ydata()[0]) == 77.73
    assert float(marks["paper"][0].get_ydata()[0]) == 76.96
    assert [bar.get_height() for bar in bwt.patches] == pytest.approx([-6.0, -6.0])


def test_shortened_runs_get_no_published_marks(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / method, {**made_result(method), "full_length": False}) for method in ("gpm", "fs-dgpm")
    ]
    figure = FIGURES["ablation"].draw(runs)
    assert all(container.get_label().startswith("_") for axes in figure.axes for container in axes.containers)


@pytest.mark.parametrize(
    ("name", "setting", "values"), [("ascent-steps", "ascent_steps", (1, 2, 3)), ("memory-size", "buffer", (50, 200))]
)
def test_sweeps_read_the_setting_from_the_configuration(
    name: str, setting: str, values: tuple[int, ...], tmp_path: Path
) -> None:
    runs = [
        write_run(tmp_path / f"{place}-{seed}", made_result("fs-dgpm", seed, level=60 + value, **{setting: value}))
        for place, value in enumerate(reversed(values))
        for seed in (0, 1)
    ]
    runs.append(write_run(tmp_path / "constant", made_result("er", **{setting: values[0]})))  # nothing to compare
    panels = FIGURES[name].draw(runs).axes
    (acc,) = panels[0].containers
    assert acc.get_label() == "FS-DGPM"
    assert list(acc[0].get_xdata()) == list(values)
    assert acc[0].get_ydata() == pytest.approx([60.5 + value - 3 for value in values])
    assert [s[1][1] - s[0][1] for s in acc[2][0].get_segments()] == pytest.approx([2 * STD] * len(values))
    if name == "ascent-steps":
        assert panels[2].containers[0][0].get_ydata() == pytest.approx([6.5 / 3] * 3)
    else:
        kept = [runs[0].result.kept_bytes / 1000] * len(values)
        assert list(panels[2].containers[0][0].get_xdata()) == pytest.approx(kept)
        assert panels[2].containers[0][0].get_ydata() == pytest.approx(acc[0].get_ydata())


def test_matrix_shows_means_over_seeds(tmp_path: Path) -> None:
    runs = study(tmp_path, ("er",))
    runs.append(write_run(tmp_path / "all", together(made_result("multitask"))))
    alone, all_at_once = FIGURES["matrix"].draw(runs).axes[:2]
    cells = alone.collections[0].get_array()
    assert cells.filled(-1).tolist() == [[-1 if v is None else v for v in row] for row in accuracy(3, 80.5)]
    assert all_at_once.collections[0].get_array().mask.tolist() == [[True] * 3] * 2 + [[False] * 3]
    assert [text.get_text() for text in alone.texts][:2] == ["80", "76"]


@pytest.mark.parametrize(
    ("name", "methods", "options", "word"),
    [
        ("forgetting", ("er",), {"tasks": 0}, "at least one task"),
        ("ablation", ("er", "fs-dgpm"), {}, "two or more of gpm"),
        ("memory-size", ("er",), {"buffer": 200}, "only 200"),
        ("memory-size", ("finetune",), {}, "none of these methods has it"),
        ("ascent-steps", ("fs-dgpm",), {"ascent_steps": 2}, "--set ascent_steps=VALUE"),
    ],
)
def test_missing_runs_are_named(
    name: str, methods: tuple[str, ...], options: dict[str, Any], word: str, tmp_path: Path
) -> None:
    if options.get("tasks") == 0:
        runs = [write_run(tmp_path / "empty", {**made_result(), "accuracy": []})]
    else:
        runs = study(tmp_path, methods, **options)
    with pytest.raises(UsageError, match=f"{name}: missing: .*{word}"):
        FIGURES[name].draw(runs)


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path: Path) -> None:
    runs = study(tmp_path, ("er",), buffer=200)
    for other, word in (
        (made_result("er", 2, buffer=50), r"the same method\.buffer \(it is 200, 50"),
        (made_result("er", 2, buffer=200, benchmark="split-mnist"), "one benchmark"),
        (made_result("er", 2, buffer=200, tasks=2), "the same number of tasks"),
        (made_result("er", 1, buffer=200), "seed 1 appears twice"),
    ):
        path = tmp_path / f"other {word[-8:]}"
        with pytest.raises(UsageError, match=word):
            FIGURES["forgetting"].draw([*runs, write_run(path, other)])
    with pytest.raises(UsageError, match="does not forget"):
        FIGURES["forgetting"].draw([write_run(tmp_path / "all", together(made_result("multitask")))])
    later = made_result("er", 2, buffer=200, new_setting=1)  # of a later version: no known difference
    FIGURES["forgetting"].draw([*runs, write_run(tmp_path / "later", later)])


VARIED = {"ascent-steps": "ascent_steps", "memory-size": "buffer"}


def drawable(path: Path, method: str, name: str, tasks: int = 3, **benchmark: Any) -> list[FinishedRun]:
    """Runs of a method with everything that the figure needs, on tasks with these settings."""
    found = []
    for value in (1, 2) if name in VARIED else (1,):
        result = made_result(method, tasks=tasks, **{VARIED.get(name, "buffer"): value})
        result["config"]["benchmark"] |= benchmark
        run = write_run(path / f"{method}-{value}", result, record(tasks, 0.5))
        found.append(write_landscape(run, surface=True))
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_methods_on_different_tasks_do_not_share_a_figure(name: str, tmp_path: Path) -> None:
    one, two = ("er", "fs-er") if name == "case-study" else ("fs-dgpm", "gpm")
    here = drawable(tmp_path, one, name, samples=60000, order="a")
    for setting, value in (("samples", 10000), ("order", "b")):
        there = drawable(tmp_path / setting, two, name, **{setting: value})
        with pytest.raises(UsageError, match=rf"the same tasks \(benchmark\.{setting} is .*{value}.*: draw"):
            FIGURES[name].draw([*here, *there])
    FIGURES[name].draw([*here, *drawable(tmp_path / "later", two, name, new_setting=1)])


@pytest.mark.parametrize("name", VARIED)
def test_sweeps_need_the_same_number_of_tasks(name: str, tmp_path: Path) -> None:
    runs = [*drawable(tmp_path, "er", name, tasks=2), *drawable(tmp_path, "fs-dgpm", name, tasks=3)]
    with pytest.raises(UsageError, match=r"the same number of tasks .these have 2, 3"):
        FIGURES[name].draw(runs)


def test_methods_are_selected_and_ordered(tmp_path: Path) -> None:
    runs = study(tmp_path, ("er", "gpm", "ewc"), seeds=1)
    first, _ = FIGURES["forgetting"].draw(runs, Choices(methods=("ewc", "er"))).axes
    assert [line.get_label() for line in first.lines] == ["EWC", "ER"]
    with pytest.raises(UsageError, match=r"no run of 'sgp'; choose from er, gpm, ewc"):
        FIGURES["forgetting"].draw(runs, Choices(methods=("sgp",)))
