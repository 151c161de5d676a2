"""The page as text: self-contained, without network access, and nothing from files becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
import time
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from report_runs import HOSTILE, QUOTES, write_run

from steppe.cli.main import main
from steppe.report.finished_run import collect
from steppe.report.page import data_block, render_page, write_report

RESULTS = Path(__file__).parents[2] / "results"
ASSETS = files("steppe.report").joinpath("assets")


class Elements(HTMLParser):
    """What a browser without scripts would see: elements with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def data_of(text: str) -> list[dict[str, object]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def pmnist() -> str:
    return render_page(collect([RESULTS / "pmnist"]), "steppe report results/pmnist")


def test_page_is_small_and_loads_nothing(pmnist: str) -> None:
    assert len(pmnist.encode()) < 1_000_000
    elements = Elements(pmnist)
    for tag, attributes in elements.found:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#")), (tag, attributes)
    assert "@import" not in pmnist
    assert "url(" not in pmnist


def test_policy_allows_only_the_pages_own_style_and_script(pmnist: str) -> None:
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', pmnist)[1])  # type: ignore[index]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    for tag in ("style", "script"):
        inline = re.search(rf"<{tag}>(.*?)</{tag}>", pmnist, re.DOTALL)
        assert inline is not None
        digest = base64.b64encode(hashlib.sha256(inline[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_table_needs_no_script(pmnist: str) -> None:
    row = re.search(r"<tr><th scope='row'>fs-dgpm</th>(.*?)</tr>", pmnist)
    assert row is not None
    cells = [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row[1])]
    table = json.loads((RESULTS / "pmnist" / "table.json").read_text(encoding="utf-8"))
    told = next(row for row in table["rows"] if row["method"] == "fs-dgpm")
    assert cells[0] == "5"
    assert cells[1] == f"{told['acc']['mean']:.2f} ± {told['acc']['std']:.2f}"
    assert cells[2] == "76.96 ± 0.51"  # the paper's
    assert cells[4].startswith("−")
    assert "<noscript>" in pmnist
    assert html.escape(table["command"]) in pmnist


@pytest.mark.parametrize("bound", ["oracle", "multitask"])
def test_a_method_that_sees_earlier_tasks_again_is_not_the_best(bound: str, tmp_path: Path) -> None:
    """Oracle has a BWT too, and by that alone would be the best sequential method."""
    for method, lift in ((bound, 9.0), ("somebodys-own", 2.0), ("er", 1.0)):
        write_run(tmp_path / method, method, lift=lift, bwt=lift)
    table = render_page(collect([tmp_path]), "").partition("<table class='results'>")[2].partition("</table>")[0]
    bold = dict(re.findall(r"<tr><th scope='row'>(.*?)</th>(.*?)</tr>", table))
    assert {method: row.count("<b>") for method, row in bold.items()} == {bound: 0, "somebodys-own": 2, "er": 0}


def test_recorded_methods_are_not_compared_with_oracle() -> None:
    text = render_page(collect([RESULTS / "landscape-study"]), "")
    chosen = re.search(r"<span class='unscripted'>compared with (.*?)</span>", text)
    assert chosen is not None
    assert chosen[1] not in ("oracle", "multitask")


def test_changed_settings_come_first(tmp_path: Path) -> None:
    both = " --set training.epochs=3 --set benchmark.tasks=3"
    write_run(tmp_path / "er", "er", changes=both)
    write_run(tmp_path / "gpm", "gpm", changes=f"{both} --set method.lr=0.5", settings={"lr": 0.5})
    text = Elements(render_page(collect([tmp_path]), "")).text
    assert "tasks: benchmark.tasks=3all methods: training.epochs=3gpm: method.lr=0.5All settings" in text
    assert "preset’s" not in text


def test_all_results_fit_on_one_page() -> None:
    text = render_page(collect([RESULTS]), "steppe report results")
    assert len(text.encode()) < 6_000_000
    titles = {
        str(section["title"]).partition(" ")[0] for section in data_of(text)
    }  # without settings that distinguish two variants
    assert {"pmnist", "cifar100-superclass", "cifar100-split", "tiny-imagenet"} <= titles
    names = [method["name"] for section in data_of(text) for method in section["methods"]]  # type: ignore[attr-defined]
    assert {"gem (lr=0.01)", "gem (lr=0.010000001)"} <= set(names)


def test_hostile_names_do_not_become_markup(tmp_path: Path) -> None:
    harmless, hostile = tmp_path / "harmless", tmp_path / "hostile"
    for seed in range(2):
        write_run(harmless / f"{seed}", "name", seed, benchmark="name", tasks=("name", "other"), remarks=["name"])
        write_run(
            *(hostile / f"{seed}", HOSTILE, seed),
            benchmark=QUOTES,
            tasks=(HOSTILE, QUOTES),
            settings={HOSTILE: QUOTES},
            changes=f" --set 'method.x={HOSTILE}'",
            remarks=[QUOTES],
            versions={HOSTILE: QUOTES},
            machine={"processor": HOSTILE, HOSTILE: QUOTES},
            command=HOSTILE,
        )
    write_run(harmless / "second", "second", benchmark="name", tasks=("name", "other"))
    write_run(hostile / "second", QUOTES, benchmark=QUOTES, tasks=(HOSTILE, QUOTES))
    text = render_page(collect([hostile]), HOSTILE)
    tags = [tag for tag, _ in Elements(text).found]
    assert tags.count("script") == 2
    assert set(tags) <= {tag for tag, _ in Elements(render_page(collect([harmless]), "steppe")).found} | {"code"}
    assert all(not name.startswith("on") for _, attributes in Elements(text).found for name in attributes)
    assert HOSTILE in Elements(text).text
    assert QUOTES in Elements(text).text
    section = data_of(text)[0]
    assert section["title"] == QUOTES
    assert section["tasks"] == [HOSTILE, QUOTES]


def test_data_cannot_leave_its_element() -> None:
    hostile = ["</script>", "<!--", "]]>", "&lt;", "\u2028\u2029", "é"]
    text = data_block(hostile)
    assert json.loads(text) == hostile
    assert not set("<>&\u2028\u2029") & set(text)


@pytest.mark.parametrize("name", [path.name for path in ASSETS.iterdir() if path.name.endswith(".js")])
def test_script_creates_text_not_markup(name: str) -> None:
    text = ASSETS.joinpath(name).read_text(encoding="utf-8")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch("):
        assert word not in text
    assert len(text.splitlines()) < 400


def test_every_asset_is_on_the_page(pmnist: str) -> None:
    for asset in ASSETS.iterdir():
        if asset.name.endswith((".js", ".css")):
            assert asset.read_text(encoding="utf-8") in pmnist


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "study" / "seed-0")
    (tmp_path / "study" / "seed-1").mkdir()
    (tmp_path / "study" / "seed-1" / "config.toml").write_text("", encoding="utf-8")
    assert main(["report", "study"]) == 0
    told = capsys.readouterr()
    assert "Wrote report.html" in told.out
    assert "seed-1: the run is not finished" in told.err
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Left out, since they are unfinished: study/seed-1." in text
    assert "steppe report study -o report.html" in text
    assert "er on pmnist" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["study", "-o", "study"], "is a directory"), (["study", "-o", "no/where.html"], "no/where.html"), (["no"], "no")],
)
def test_invalid_commands_are_rejected(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "study" / "seed-0")
    assert main(["report", *arguments]) in (1, 2)
    assert named in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_one_run_is_fast_and_needs_neither_scipy_nor_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    for name in ("scipy", "scipy.special", "scipy.stats", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    started = time.process_time()
    write_report([tmp_path / "run"], tmp_path / "report.html", "steppe run")
    assert time.process_time() - started < 0.5
    write_report([tmp_path / "run"], tmp_path / "again.html", "steppe run")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_forward_transfer_has_a_column_if_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "without" / "er", "er")
    write_run(tmp_path / "with" / "er", "er", forward_transfer=-3.25)
    write_run(tmp_path / "with" / "gpm", "gpm")
    assert "transfer</th>" not in render_page(collect([tmp_path / "without"]), "steppe report without")
    text = render_page(collect([tmp_path / "with"]), "steppe report with")
    assert "forward<br>transfer</th>" in text
    assert "−3.25" in text
    assert "Forward transfer: mean accuracy on a task before it is learned" in text
    table = text.partition("<table class='results'>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr><th scope='row'>(?:er|gpm)</th>(.*?)</tr>", table)
    assert [row.count("<td") for row in rows] == [11, 11]  # empty for the method without it
