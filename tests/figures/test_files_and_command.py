"""Figures as files and as a command: three kinds, the same bytes, one look for each method, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from made_runs import made_result, record, write_landscape, write_run

pytest.importorskip("matplotlib")

from steppe.cli.main import main
from steppe.errors import RunError, UsageError
from steppe.figures import FIGURES, Choices
from steppe.figures.output import SUFFIXES, content, files_for
from steppe.figures.reading import Run
from steppe.figures.style import LOOKS, label, look, looks
from steppe.registry import METHODS

BEGINNINGS = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
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
def test_every_figure_can_be_saved_and_says_what_it_is(name: str, runs: list[Run], tmp_path: Path) -> None:
    given = list(runs)
    if name in ("ascent-steps", "memory-size"):
        given.append(write_run(tmp_path / "varied", made_result("fs-dgpm", ascent_steps=1)))
        given.append(write_run(tmp_path / "larger", made_result("fs-er", buffer=200)))
    assert FIGURES[name].missing(given, Choices()) == []
    assert content(FIGURES[name].drawn(given), ".svg").startswith(BEGINNINGS[".svg"])
    assert FIGURES[name].text.endswith(".")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_results_give_the_same_bytes(suffix: str, runs: list[Run]) -> None:
    figures = [FIGURES["forgetting"].drawn(runs) for _ in range(2)]
    one, other = (content(figure, suffix) for figure in figures)
    assert one == other
    assert one.startswith(BEGINNINGS[suffix])
    for word in (b"CreationDate", b"<dc:date>", b"Creation Time"):
        assert word not in one


def test_matplotlibs_settings_stay_and_a_users_do_not_matter(runs: list[Run]) -> None:
    import matplotlib

    plain = content(FIGURES["forgetting"].drawn(runs), ".png")
    with matplotlib.rc_context({"font.size": 20.0, "lines.linewidth": 9.0}):
        assert content(FIGURES["forgetting"].drawn(runs), ".png") == plain
        assert matplotlib.rcParams["font.size"] == 20.0


def test_methods_look_the_same_everywhere_and_differ_in_grey() -> None:
    assert set(METHODS) >= set(LOOKS)
    assert len({(own.marker, own.line) for own in LOOKS.values()}) == len(LOOKS)
    for together in (
        ("gpm", "dgpm", "la-dgpm", "fs-gpm", "fs-dgpm", "fs-sgpm"),  # the ablation
        ("fs-dgpm", "fs-sgpm", "er", "gpm", "finetune"),  # most pages
        ("er", "gpm", "la-maml", "oracle", "fs-dgpm", "fs-er"),  # landscapes
    ):
        assert len({LOOKS[name].colour for name in together}) == len(together)
    own = look("somebody's own")
    assert own == look("somebody's own")
    assert (own.marker, own.line) not in {(each.marker, each.line) for each in LOOKS.values()}
    assert [label(name) for name in ("fs-dgpm", "la-maml", "der++", "mine")] == ["FS-DGPM", "La-MAML", "DER++", "mine"]


PLUGINS = ["lwf", "si", "mir", "gss", "ocs", "my-er", "ours-v2"]  # by their names alone, some look alike


@pytest.mark.parametrize("count", [21, 147])
def test_methods_drawn_together_look_different(count: int) -> None:
    """In grey too while there are pairs of marker and line left, of which there are 21; in colour up to 147."""
    names = [*PLUGINS, *(f"own-{number}" for number in range(count - len(PLUGINS)))]
    together = looks([*LOOKS, *names])
    assert {method: together[method] for method in LOOKS} == LOOKS  # ours stay as they are
    assert len(set(together.values())) == len(LOOKS) + count
    if count == 21:
        assert len({(each.marker, each.line) for each in together.values()}) == len(LOOKS) + count
    assert looks(reversed([*LOOKS, *names])) == together
    assert set(looks([*LOOKS, *names, "one more", "another"])) == {*LOOKS, *names, "one more", "another"}


def test_a_figure_tells_methods_of_ones_own_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, made_result(name)) for name in ("er", *PLUGINS)]
    first, _ = FIGURES["forgetting"].drawn(runs).axes
    drawn = {line.get_label(): (line.get_marker(), line.get_linestyle()) for line in first.lines}
    assert len(set(drawn.values())) == len(drawn) == 1 + len(PLUGINS)
    assert drawn["ER"] == (LOOKS["er"].marker, LOOKS["er"].line)
    (alone, _) = FIGURES["forgetting"].drawn(runs[1:2]).axes  # with nobody to be taken for, a look is the name's own
    assert alone.lines[0].get_marker() == look("lwf").marker


@pytest.mark.parametrize("name", [r"my$\foo$", "_mine", "$", "__", "a$b", r"a\$b$"])
def test_names_are_drawn_sign_by_sign(name: str, tmp_path: Path) -> None:
    results = [made_result(method, benchmark=name, buffer=1) for method in (name, "gpm", "er")]
    runs = [write_run(tmp_path / str(place), result, record(3, 0.5)) for place, result in enumerate(results)]
    runs.append(write_run(tmp_path / "other", made_result(name, benchmark="another one")))
    for figure, shown in (("forgetting", runs[:3]), ("matrix", runs[:3]), ("comparison", runs)):
        drawn = FIGURES[figure].drawn(shown)
        for suffix in SUFFIXES:
            assert content(drawn, suffix)
        if figure != "matrix":
            entries = [text.get_text() for text in drawn.legends[0].get_texts()]
            expected = [label(name), "GPM", "ER", *([label(name), "another one"] if figure == "comparison" else [])]
            assert entries == list(dict.fromkeys(expected))
    assert label(name).replace(r"\$", "$").lstrip("\u200b") == name
    assert FIGURES["ablation"].drawn(runs[:2], Choices(methods=(name, "gpm"))).axes[0].get_title() == label(name)


def test_where_a_figure_goes(tmp_path: Path) -> None:
    assert files_for(None, "matrix") == [Path("matrix.pdf"), Path("matrix.svg"), Path("matrix.png")]
    assert files_for(Path("a/b.svg"), "matrix") == [Path("a/b.svg")]
    assert files_for(tmp_path, "matrix")[0] == tmp_path / "matrix.pdf"
    with pytest.raises(UsageError, match=r"a\.jpg: a figure is written as \.pdf, \.svg, \.png"):
        files_for(Path("a.jpg"), "matrix")


def test_the_command_writes_one_file_or_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("study/er"), made_result("er"))
    assert main(["figures", "matrix", "study", "study/er"]) == 0  # a run named twice counts once
    assert capsys.readouterr().out == "Wrote matrix.pdf, matrix.svg, matrix.png.\n"
    assert main(["figures", "matrix", "-o", "deep/one.pdf", "study"]) == 0
    assert sorted(str(path) for path in Path().rglob("*.pdf")) == ["deep/one.pdf", "matrix.pdf"]
    for suffix in SUFFIXES:
        assert Path(f"matrix{suffix}").read_bytes().startswith(BEGINNINGS[suffix])


def test_what_cannot_be_drawn_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("study/er"), made_result("er"))
    for arguments, word in (
        (["landscapes", "study"], "run steppe landscape study/er --after 1,2,3 --task 1"),
        (["landscapes", "study", "--task", "one"], "by their numbers"),
        (["matrix", "study", "-o", "a.txt"], ".pdf"),
        (["matrix", "study", "--methods", "gpm"], "no run of 'gpm'"),
        (["forgetting", "study", "--task", "2"], "--task 2: forgetting does not ask which tasks to show: leave it out"),
        (["matrix", "study", "--after", "1,2"], "--after 1,2: matrix does not ask which tasks to show"),
    ):
        assert main(["figures", *arguments]) == 2
        assert word in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["study"]


def test_the_list_says_what_is_needed_and_what_is_missing(
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


def test_who_asks_for_tasks_says_so() -> None:
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


def test_without_matplotlib_the_remedy_is_named(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match="pip install matplotlib"):
        FIGURES["matrix"].drawn(runs)
