"""Figures as files and as a command: three formats, reproducible bytes, one style per method, and errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from made_runs import made_result, record, write_landscape, write_run

pytest.importorskip("matplotlib")

from steppe.cli.main import main
from steppe.errors import RunError, UsageError
from steppe.figures import FIGURES, Choices
from steppe.figures.output import SUFFIXES, output_files, render
from steppe.figures.style import METHOD_STYLES, assign_styles, display_name, style_of
from steppe.registry import METHODS
from steppe.report.finished_run import FinishedRun

BEGINNINGS = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[FinishedRun]:
    """Enough for every figure."""
    path = tmp_path_factory.mktemp("study")
    found = [
        write_landscape(write_run(path / f"{method}-{seed}", made_result(method, seed, buffer=buffer)), surface=True)
        for method, seed, buffer in (("er", 0, 50), ("er", 1, 50), ("fs-er", 0, 50))
    ]
    found += [
        write_landscape(
            write_run(path / f"{method}", made_result(method, ascent_steps=2), record(3, 0.5)), surface=True
        )
        for method in ("fs-dgpm", "gpm")
    ]
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_saved_and_has_a_description(name: str, runs: list[FinishedRun], tmp_path: Path) -> None:
    given = list(runs)
    if name in ("ascent-steps", "memory-size"):
        given.append(write_run(tmp_path / "varied", made_result("fs-dgpm", ascent_steps=1)))
        given.append(write_run(tmp_path / "larger", made_result("fs-er", buffer=200)))
    assert FIGURES[name].missing(given, Choices()) == []
    assert render(FIGURES[name].draw(given), ".svg").startswith(BEGINNINGS[".svg"])
    assert FIGURES[name].text.endswith(".")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_results_give_the_same_bytes(suffix: str, runs: list[FinishedRun]) -> None:
    figures = [FIGURES["forgetting"].draw(runs) for _ in range(2)]
    one, other = (render(figure, suffix) for figure in figures)
    assert one == other
    assert one.startswith(BEGINNINGS[suffix])
    for word in (b"CreationDate", b"<dc:date>", b"Creation Time"):
        assert word not in one


def test_matplotlib_settings_are_restored_and_a_users_have_no_effect(runs: list[FinishedRun]) -> None:
    import matplotlib

    plain = render(FIGURES["forgetting"].draw(runs), ".png")
    with matplotlib.rc_context({"font.size": 20.0, "lines.linewidth": 9.0}):
        assert render(FIGURES["forgetting"].draw(runs), ".png") == plain
        assert matplotlib.rcParams["font.size"] == 20.0


def test_methods_have_one_style_that_differs_in_grayscale() -> None:
    assert set(METHODS) >= set(METHOD_STYLES)
    assert len({(own.marker, own.line) for own in METHOD_STYLES.values()}) == len(METHOD_STYLES)
    for together in (
        ("gpm", "dgpm", "la-dgpm", "fs-gpm", "fs-dgpm", "fs-sgpm", "fs-rgpm"),  # the ablation
        ("fs-dgpm", "fs-sgpm", "er", "gpm", "finetune"),  # most pages
        ("er", "gpm", "la-maml", "oracle", "fs-dgpm", "fs-er"),  # landscapes
    ):
        assert len({METHOD_STYLES[name].color for name in together}) == len(together)
    own = style_of("somebody's own")
    assert own == style_of("somebody's own")
    assert (own.marker, own.line) not in {(each.marker, each.line) for each in METHOD_STYLES.values()}
    assert [display_name(name) for name in ("fs-dgpm", "la-maml", "der++", "mine")] == [
        "FS-DGPM",
        "La-MAML",
        "DER++",
        "mine",
    ]


PLUGINS = ["lwf", "si", "mir", "gss", "ocs", "my-er", "ours-v2"]  # by their names alone, some have the same style


@pytest.mark.parametrize("count", [20, 140])
def test_methods_drawn_together_have_different_styles(count: int) -> None:
    """In grayscale too, for up to 20 pairs of marker and line; in color for up to 140 methods."""
    names = [*PLUGINS, *(f"own-{number}" for number in range(count - len(PLUGINS)))]
    together = assign_styles([*METHOD_STYLES, *names])
    assert {method: together[method] for method in METHOD_STYLES} == METHOD_STYLES  # built-in styles do not change
    assert len(set(together.values())) == len(METHOD_STYLES) + count
    if count == 20:
        assert len({(each.marker, each.line) for each in together.values()}) == len(METHOD_STYLES) + count
    assert assign_styles(reversed([*METHOD_STYLES, *names])) == together
    assert set(assign_styles([*METHOD_STYLES, *names, "one more", "another"])) == {
        *METHOD_STYLES,
        *names,
        "one more",
        "another",
    }


def test_custom_methods_have_different_styles_in_a_figure(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, made_result(name)) for name in ("er", *PLUGINS)]
    first, _ = FIGURES["forgetting"].draw(runs).axes
    drawn = {line.get_label(): (line.get_marker(), line.get_linestyle()) for line in first.lines}
    assert len(set(drawn.values())) == len(drawn) == 1 + len(PLUGINS)
    assert drawn["ER"] == (METHOD_STYLES["er"].marker, METHOD_STYLES["er"].line)
    (alone, _) = FIGURES["forgetting"].draw(runs[1:2]).axes  # alone, its style depends only on its name
    assert alone.lines[0].get_marker() == style_of("lwf").marker


@pytest.mark.parametrize("name", [r"my$\foo$", "_mine", "$", "__", "a$b", r"a\$b$"])
def test_names_are_drawn_literally(name: str, tmp_path: Path) -> None:
    results = [made_result(method, benchmark=name, buffer=1) for method in (name, "gpm", "er")]
    runs = [write_run(tmp_path / str(place), result, record(3, 0.5)) for place, result in enumerate(results)]
    runs.append(write_run(tmp_path / "other", made_result(name, benchmark="another one")))
    for figure, shown in (("forgetting", runs[:3]), ("matrix", runs[:3]), ("comparison", runs)):
        drawn = FIGURES[figure].draw(shown)
        for suffix in SUFFIXES:
            assert render(drawn, suffix)
        if figure != "matrix":
            entries = [text.get_text() for text in drawn.legends[0].get_texts()]
            expected = [
                display_name(name),
                "GPM",
                "ER",
                *([display_name(name), "another one"] if figure == "comparison" else []),
            ]
            assert entries == list(dict.fromkeys(expected))
    assert display_name(name).replace(r"\$", "$").lstrip("\u200b") == name
    assert FIGURES["ablation"].draw(runs[:2], Choices(methods=(name, "gpm"))).axes[0].get_title() == display_name(name)


def test_output_files(tmp_path: Path) -> None:
    assert output_files(None, "matrix") == [Path("matrix.pdf"), Path("matrix.svg"), Path("matrix.png")]
    assert output_files(Path("a/b.svg"), "matrix") == [Path("a/b.svg")]
    assert output_files(tmp_path, "matrix")[0] == tmp_path / "matrix.pdf"
    with pytest.raises(UsageError, match=r"a\.jpg: use one of \.pdf, \.svg, \.png"):
        output_files(Path("a.jpg"), "matrix")


def test_the_command_writes_one_file_or_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("study/er"), made_result("er"))
    assert main(["figures", "matrix", "study", "study/er"]) == 0  # a run given twice counts once
    assert capsys.readouterr().out == "Wrote matrix.pdf, matrix.svg, matrix.png.\n"
    assert main(["figures", "matrix", "-o", "deep/one.pdf", "study"]) == 0
    assert sorted(str(path) for path in Path().rglob("*.pdf")) == ["deep/one.pdf", "matrix.pdf"]
    for suffix in SUFFIXES:
        assert Path(f"matrix{suffix}").read_bytes().startswith(BEGINNINGS[suffix])


def test_failed_figures_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("study/er"), made_result("er"))
    for arguments, word in (
        (["landscapes", "study"], "run steppe landscape study/er --after 1,2,3 --task 1"),
        (["landscapes", "study", "--task", "one"], "must be task numbers"),
        (["matrix", "study", "-o", "a.txt"], ".pdf"),
        (["matrix", "study", "--methods", "gpm"], "no run of 'gpm'"),
        (["forgetting", "study", "--task", "2"], "--task 2: forgetting does not show single tasks; remove the option"),
        (["matrix", "study", "--after", "1,2"], "--after 1,2: matrix does not show single tasks"),
    ):
        assert main(["figures", *arguments]) == 2
        assert word in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["study"]


def test_the_list_names_needs_and_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["figures", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: {figure.text}\n  needs: {figure.needs}" in out for name, figure in FIGURES.items())
    assert "missing" not in out
    write_run(Path("study/er"), made_result("er"))
    assert main(["figures", "--list", "study"]) == 0
    parts = dict(zip(FIGURES, capsys.readouterr().out.split("\n  needs: ")[1:], strict=True))
    assert "nothing is missing" in parts["matrix"]
    assert "missing: landscape.json in study/er: run steppe landscape study/er" in parts["landscapes"]
    assert "missing: runs of fs-er" in parts["case-study"]


def test_figures_by_task_mention_their_options() -> None:
    assert {name for name, figure in FIGURES.items() if figure.by_task} == {
        name for name, figure in FIGURES.items() if "--task" in figure.needs and "--after" in figure.needs
    }


def test_the_help_lists_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["figures", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in FIGURES)
    with pytest.raises(SystemExit) as stopped:
        main(["figures"])
    assert stopped.value.code == 2


def test_missing_matplotlib_is_explained(runs: list[FinishedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match="pip install matplotlib"):
        FIGURES["matrix"].draw(runs)
