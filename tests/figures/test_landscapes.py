"""Figures of landscapes and importances: what is plotted, read from the axes."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import losses, made_result, record, together, write_landscape, write_run
from read_back import band

pytest.importorskip("matplotlib")

from steppe.errors import RunError, UsageError
from steppe.figures import FIGURES, Choices
from steppe.report.finished_run import FinishedRun

ALPHAS = [-1.0, -0.5, 0.0, 0.5, 1.0]


def measured(path: Path, methods: tuple[str, ...], *, surface: bool = False) -> list[FinishedRun]:
    """Two seeds of each method, of which the first has a landscape; each method's is higher than the previous one's."""
    found = []
    for place, method in enumerate(methods):
        first = write_run(path / method / "seed-0", made_result(method, 0, level=60 + 10 * place))
        found.append(write_landscape(first, height=1.0 + place, surface=surface))
        found.append(write_run(path / method / "seed-1", made_result(method, 1, level=60 + 10 * place)))
    return found


def mean(after: int, task: int, height: float) -> list[float]:
    return [sum(values) / 2 for values in zip(*losses(after, task, height), strict=True)]


def test_profiles_are_means_over_directions_with_bands(tmp_path: Path) -> None:
    figure = FIGURES["landscapes"].draw(measured(tmp_path, ("er", "gpm")), Choices(tasks=(2,), afters=(2, 3)))
    early, late = figure.axes
    for axes, after in ((early, 2), (late, 3)):
        for place in (0, 1):
            assert list(axes.lines[place].get_xdata()) == ALPHAS
            assert axes.lines[place].get_ydata() == pytest.approx(mean(after, 2, 1.0 + place))
    spreads = [alpha**2 * 2**-0.5 for alpha in ALPHAS]  # the steepnesses are 1 and 2
    expected = [pytest.approx((y - s, y + s)) for y, s in zip(mean(2, 2, 1.0), spreads, strict=True)]
    assert band(early, 0) == expected
    assert [axes.get_title() for axes in figure.axes] == ["(a) task 2 after task 2", "(b) task 2 after task 3"]


def test_seeds_are_pooled_where_several_were_measured(tmp_path: Path) -> None:
    runs = [
        write_landscape(write_run(tmp_path / str(seed), made_result("er", seed)), height=1.0 + seed) for seed in (0, 2)
    ]
    (axes,) = FIGURES["landscapes"].draw(runs, Choices(afters=(1,))).axes
    assert axes.lines[0].get_ydata() == pytest.approx(mean(1, 1, 2.0))


def test_the_grid_has_tasks_in_rows_and_networks_in_columns(tmp_path: Path) -> None:
    axes = FIGURES["landscape-grid"].draw(measured(tmp_path, ("er",))).axes
    assert len(axes) == 9
    for task in (1, 2, 3):
        for after in (1, 2, 3):
            panel = axes[3 * (task - 1) + after - 1]
            assert panel.axison == (task <= after)
            if task <= after:
                assert panel.lines[0].get_ydata() == pytest.approx(mean(after, task, 1.0))
    fewer = FIGURES["landscape-grid"].draw(measured(tmp_path / "b", ("er",)), Choices(tasks=(1,), afters=(2, 3)))
    assert len(fewer.axes) == 2


def test_stability_is_the_papers_figure_1(tmp_path: Path) -> None:
    runs = measured(tmp_path, ("er", "gpm"))
    kept, b, c, learnt, e = FIGURES["stability"].draw(runs).axes
    assert kept.lines[0].get_ydata() == pytest.approx([60.5, 56.5, 52.5])
    for axes, (after, task) in ((b, (2, 1)), (c, (3, 1)), (e, (2, 2))):  # of three tasks the second is the middle one
        assert axes.lines[1].get_ydata() == pytest.approx(mean(after, task, 2.0))
    assert [bar.get_height() for bar in learnt.patches] == pytest.approx([61.5, 71.5])
    assert "cut axis" in learnt.get_ylabel()
    with pytest.raises(UsageError, match="multitask does not"):
        FIGURES["stability"].draw([*runs, write_run(tmp_path / "all", together(made_result("multitask")))])


def test_the_case_study_has_the_papers_figures_beside_ours(tmp_path: Path) -> None:
    runs = [
        write_landscape(write_run(tmp_path / method, made_result(method, level=level, benchmark="pmnist-60k")))
        for method, level in (("fs-er", 95.0), ("gpm", 99.0), ("er", 90.0))
    ]
    average, just, end, acc, bwt = FIGURES["case-study"].draw(runs).axes
    assert [line.get_label() for line in average.lines] == ["ER", "FS-ER"]
    assert just.lines[0].get_ydata() == pytest.approx(mean(2, 2, 1.0))
    assert end.lines[0].get_ydata() == pytest.approx(mean(3, 2, 1.0))
    assert [bar.get_height() for bar in acc.patches] == pytest.approx([87.0, 92.0])
    marks = [container[0].get_ydata()[0] for container in acc.containers if container.get_label() == "paper"]
    assert marks == [86.16, 90.44]
    assert [bar.get_height() for bar in bwt.patches] == pytest.approx([-6.0, -6.0])
    with pytest.raises(UsageError, match="runs of fs-er"):
        FIGURES["case-study"].draw(runs[1:])


def test_surfaces_are_drawn_with_the_first_direction_to_the_right(tmp_path: Path) -> None:
    runs = measured(tmp_path, ("er", "gpm"), surface=True)
    figure = FIGURES["surface"].draw(runs)
    levels = figure.axes[0].collections[0].levels
    assert levels[0] <= 1.0 < levels[1]
    lines = figure.axes[0].collections[1]  # losses are 10 row + column + 1: rows are alphas of the first direction
    level = next(place for place, value in enumerate(lines.levels) if 15 < value < 35)
    xs, ys = lines.get_paths()[level].vertices.T
    assert max(xs) - min(xs) < max(ys) - min(ys)
    assert "task 3 after task 3" in figure.axes[-1].get_ylabel()
    chosen = FIGURES["surface"].draw(runs, Choices(tasks=(1,), afters=(2,)))
    assert "task 1 after task 2" in chosen.axes[-1].get_ylabel()


def test_missing_landscapes_are_named_with_the_command(tmp_path: Path) -> None:
    figure = FIGURES["landscapes"]
    bare = write_run(tmp_path / "er" / "seed-0", made_result("er"))
    with pytest.raises(UsageError, match=r"landscape\.json in .*seed-0: run steppe landscape .*seed-0 --after 1,2,3"):
        figure.draw([bare])
    part = write_landscape(bare, pairs=[(1, 1)])
    with pytest.raises(UsageError, match=r"task 1 after task 2, task 1 after task 3 in .* --resume .*--after 1,2,3"):
        figure.draw([part])
    with pytest.raises(UsageError, match=r"task 2 after task 1 .there are 3 tasks"):
        figure.draw([part], Choices(tasks=(2,), afters=(1,)))
    with pytest.raises(UsageError, match="--task 1,2: this figure shows one"):
        figure.draw([part], Choices(tasks=(1, 2)))
    with pytest.raises(UsageError, match=r"a surface of er: run steppe landscape .* --surface --after 3 --task 2"):
        FIGURES["surface"].draw([part])
    other = write_landscape(write_run(tmp_path / "gpm", made_result("gpm")), points=7)
    with pytest.raises(UsageError, match=r"with the same points \(5 in .*seed-0, 7 in .*gpm: .* --points"):
        figure.draw([part, other], Choices(afters=(1,)))
    many = [write_run(tmp_path / name, made_result(name)) for name in ("ewc", "gem", "sgp", "dgpm")]
    with pytest.raises(UsageError, match="the same for 1 more methods"):
        figure.draw(many)


@pytest.mark.parametrize("name", ["landscapes", "landscape-grid", "stability"])
def test_networks_that_do_not_exist_are_rejected(name: str, tmp_path: Path) -> None:
    """Joint training leaves only the weights after the last task, which may have a landscape."""
    runs = [*measured(tmp_path, ("er",)), write_run(tmp_path / "multitask", together(made_result("multitask")))]
    with pytest.raises(UsageError) as refused:
        FIGURES[name].draw(runs)
    told = "methods that learn one task at a time (multitask does not: choose others by --methods)"
    assert str(refused.value) == f"{name}: missing: {told}."
    assert FIGURES[name].missing(Choices(methods=("er",)).filter(runs), Choices()) == []


@pytest.mark.parametrize("name", ["landscapes", "landscape-grid"])
def test_last_network_of_joint_training_is_drawn(name: str, tmp_path: Path) -> None:
    runs = [*measured(tmp_path, ("er",)), write_run(tmp_path / "multitask", together(made_result("multitask")))]
    with pytest.raises(UsageError, match=r"run steppe landscape .*multitask .*--after 3"):
        FIGURES[name].draw(runs, Choices(afters=(3,)))
    runs[-1] = write_landscape(runs[-1], pairs=[(3, 1), (3, 2), (3, 3)])
    assert FIGURES[name].draw(runs, Choices(afters=(3,))).axes


def test_landscape_of_another_run_is_rejected(tmp_path: Path) -> None:
    one = write_landscape(write_run(tmp_path / "one", made_result("er", 0)))
    two = write_run(tmp_path / "two", made_result("er", 1))
    (two.path / "landscape.json").write_bytes((one.path / "landscape.json").read_bytes())
    with pytest.raises(RunError, match=r"another run .seed 0, not 1"):
        FIGURES["landscapes"].draw([two])
    three = write_run(tmp_path / "three", made_result("er", 0, buffer=200))
    (three.path / "landscape.json").write_bytes((one.path / "landscape.json").read_bytes())
    with pytest.raises(RunError, match=r"another run .other settings"):
        FIGURES["landscapes"].draw([three])


@pytest.mark.parametrize(("setting", "value"), [("samples", 50), ("seed", 1), ("range", 2.0)])
def test_landscapes_with_different_settings_do_not_share_a_figure(setting: str, value: float, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / method, made_result(method)) for method in ("er", "gpm")]
    with pytest.raises(UsageError, match=f"measured with the same {setting}"):
        FIGURES["landscapes"].draw([write_landscape(runs[0]), write_landscape(runs[1], **{setting: value})])
    FIGURES["landscapes"].draw([runs[0], write_landscape(runs[1], sigma=0.1)])  # affects the bound only
    bare = write_run(tmp_path / "bare", made_result("sgp"))  # the suggested command uses the settings of the others
    with pytest.raises(UsageError, match=rf"landscape .*bare .*--{setting} {value} .*--after"):
        FIGURES["landscapes"].draw([write_landscape(runs[0], **{setting: value}), bare])


def test_importances_are_bands_between_mean_deciles_and_ranks(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"seed-{seed}", made_result("fs-sgpm", seed), record(3, low))
        for seed, low in ((0, 0.1), (1, 0.3))
    ]
    hard = [{"ranks": entry["ranks"]} for entry in record(3, 0)]
    runs.append(write_run(tmp_path / "gpm", made_result("gpm"), hard))
    shares, ranks = FIGURES["importances"].draw(runs).axes
    deciles = [[0.2 + place / 10 + rank / 100 for rank in range(11)] for place in (1, 2)]
    assert list(shares.lines[0].get_xdata()) == [2, 3]
    assert shares.lines[0].get_ydata() == pytest.approx([row[5] for row in deciles])
    for number, (low, high) in enumerate(((0, 10), (1, 9), (2, 8), (3, 7), (4, 6))):
        for found, row in zip(band(shares, number), deciles, strict=True):
            assert found == pytest.approx((row[low], row[high]))
    assert [line.get_label() for line in ranks.lines][:2] == ["FS-SGPM", "GPM"]
    assert ranks.lines[0].get_ydata() == pytest.approx([10, 20, 30])
    assert shares.get_title() == "first"
    assert shares.get_ylabel() == "λ, FS-SGPM\nbasis before"
    assert ranks.get_ylabel() == "rank of the basis after"


def test_importances_name_their_basis(tmp_path: Path) -> None:
    """If a method records λ after the first task, it belongs to the basis built after the task."""
    grown = record(3, 0.1)
    grown[0]["importances"] = grown[1]["importances"]
    runs = [
        write_run(tmp_path / "sgp", made_result("sgp"), grown),
        write_run(tmp_path / "fs-dgpm", made_result("fs-dgpm"), record(3, 0.1)),
    ]
    *shares, _ = FIGURES["importances"].draw(runs).axes
    assert {axes.get_ylabel(): list(axes.lines[0].get_xdata()) for axes in shares} == {
        "λ, FS-DGPM\nbasis before": [2, 3],
        "λ, SGP\nbasis after": [1, 2, 3],
    }


def test_a_layer_without_a_basis_at_first_has_rank_0_there(tmp_path: Path) -> None:
    late = record(3, 0.1)
    del late[0]["ranks"]["first.weight"]
    runs = [write_run(tmp_path / f"seed-{seed}", made_result("fs-sgpm", seed), late) for seed in (0, 1)]
    _, ranks = FIGURES["importances"].draw(runs).axes
    assert ranks.lines[0].get_ydata() == pytest.approx([0, 20, 30])


def test_missing_importances_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"importances in the log\.jsonl of a run \(er: none"):
        FIGURES["importances"].draw([write_run(tmp_path / "er", made_result("er"), [{}, {}, {}])])
    short = write_run(tmp_path / "short", made_result("fs-dgpm"), record(2, 0.5))
    with pytest.raises(UsageError, match=r"each of its 3 tasks in .*log\.jsonl"):
        FIGURES["importances"].draw([short])
    bad = write_run(tmp_path / "bad", made_result("fs-dgpm"), [])
    (bad.path / "log.jsonl").write_text("no log\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"importances in the log\.jsonl of a run"):
        FIGURES["importances"].draw([bad])
