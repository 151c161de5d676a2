"""Code in the documents runs as shown, and links and names in them exist."""

from __future__ import annotations

import html
import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import steppe
from steppe.cli.main import build_parser, main
from steppe.figures import FIGURES
from steppe.registry import BENCHMARKS, METHODS

ROOT = Path(__file__).parents[2]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def test_main_job_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's ten lines, with fewer tasks and samples."""
    main_job = python_blocks("README.md")[0]
    shortened = main_job.replace("steppe.PMNIST()", "steppe.PMNIST(tasks=2, samples=100, test_samples=500)")
    assert shortened != main_job
    exec(compile(shortened, "README.md", "exec"), {})
    assert re.fullmatch(r"ACC \d+\.\d\d  BWT -?\d+\.\d\d\n", capsys.readouterr().out)
    assert len([line for line in main_job.splitlines() if line.strip()]) <= 12
    assert python_blocks("docs/index.md") == [main_job]


def test_own_model_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(python_blocks("README.md")[1], "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_method_in_one_file(tmp_path: Path) -> None:
    plugin = tmp_path / "anchor.py"
    plugin.write_text(python_blocks("docs/recipes/own-method.md")[0], encoding="utf-8")
    sets = ["--set", "tasks=2", "--set", "benchmark.samples=50", "--set", "test_samples=100"]
    try:
        assert main(["run", "pmnist", "anchor", "--plugin", str(plugin), *sets, "--out", str(tmp_path / "out")]) == 0
    finally:
        METHODS.pop("anchor", None)
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert result["config"]["method"]["pull"] == 0.05


def test_a_benchmark_in_one_file(tmp_path: Path) -> None:
    plugin = tmp_path / "odd_even.py"
    plugin.write_text(python_blocks("docs/recipes/own-benchmark.md")[0], encoding="utf-8")
    arguments = ["run", "odd-even", "er", "--plugin", str(plugin), "--set", "benchmark.samples=50"]
    try:
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    finally:
        BENCHMARKS.pop("odd-even", None)
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert len(result["accuracy"]) == 2


PLUGINS = {"own-method.md", "own-benchmark.md"}  # run as a plugin above
PAGES_WITH_CODE = ["docs/concepts.md", "docs/own-loop.md", "docs/scenarios.md"] + [
    f"docs/recipes/{page.name}"
    for page in sorted((ROOT / "docs" / "recipes").glob("*.md"))
    if page.name not in PLUGINS and "```python" in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", PAGES_WITH_CODE)
def test_code_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From top to bottom, as a reader would type it, in an empty directory except for a folder of photographs."""
    if name.endswith("adapters.md"):
        pytest.importorskip("peft", reason="the page is about this library")
    photographs(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for block in python_blocks(name):
        exec(compile(block, name, "exec"), space)
    printed = capsys.readouterr().out
    assert printed
    if name.endswith("keep-learning.md"):  # if all of it were rejected, the page would teach the wrong thing
        assert printed.count("accepted") >= 2


def photographs(folder: Path) -> None:
    colours = {"ants": (200, 40, 40), "bees": (40, 200, 40), "cats": (40, 40, 200), "dogs": (200, 200, 40)}
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for number in range(12):
            shade = tuple(part + number for part in colour)
            Image.new("RGB", (40, 36), shade).save(folder / name / f"{number}.png")


DOCUMENTS = [*ROOT.glob("*.md"), ROOT / "results" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_targets(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert target.startswith("http") or (document.parent / target).exists(), target


def resolved(name: str) -> object:
    """What a full name stands for; for an adapter whose library is not installed, the error that says so."""
    try:
        return pkgutil.resolve_name(name)
    except steppe.UsageError as error:
        if not name.startswith("steppe.integrations."):
            raise
        return error


EXAMPLE_FILES = {"anchor.py", "odd_even.py"}  # files that a reader writes


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_and_names_exist(document: Path) -> None:
    """Every `file.py`, with or without its folders, and every `steppe.name`."""
    text = document.read_text(encoding="utf-8")
    folders = [ROOT / name for name in ("src", "tests", "scripts", "bench", "examples")]
    present = [path.as_posix() for folder in folders for path in folder.rglob("*.py")]
    for name in {name for span in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"[\w/]+\.py\b", span)}:
        a_readers = Path(name).name in EXAMPLE_FILES or "NAME" in name
        assert a_readers or any(path.endswith(f"/{name}") for path in present), name
    for name in set(re.findall(r"(?<![\w./-])steppe(?:\.[A-Za-z_]\w*)+", text)):
        assert resolved(name.removesuffix(".safetensors")) is not None, name


def test_pages_named_in_the_source_exist() -> None:
    """Pages named in docstrings and comments; a specification does not count."""
    named: set[str] = set()
    for source in sorted((ROOT / "src").rglob("*.py")):
        text = source.read_text()
        assert "SPEC" not in text, source
        named |= set(re.findall(r"docs/[\w./-]+\.md", text))
    assert {"docs/concepts.md", "docs/landscapes.md", "docs/performance.md"} <= named
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def test_every_method_has_a_page() -> None:
    index = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    for method in METHODS:
        assert f"`{method}`" in index


def test_numbers_in_documents_come_from_results() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fill_results.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"out of date, run scripts/fill_results.py: {done.stdout}{done.stderr}"


PAGES_WITH_COMMANDS = [
    document.relative_to(ROOT).as_posix()
    for document in DOCUMENTS
    if re.search(r"^\$ steppe |`steppe [a-z]+ [^`]+`", document.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", PAGES_WITH_COMMANDS)
def test_commands_shown_can_be_parsed(name: str) -> None:
    """Every steppe command line that a reader may copy."""
    text = (ROOT / name).read_text(encoding="utf-8")
    shown = re.findall(r"^\$ (steppe [^#\n]+)", text, re.MULTILINE) + re.findall(r"`(steppe [a-z]+ [^`]+)`", text)
    assert shown
    for line in shown:
        assert build_parser().parse_args(shlex.split(line.replace("\n", " "))[1:]).action


def test_pages_about_commands_show_some() -> None:
    assert {"README.md", "docs/index.md", "docs/recipes/see-forgetting.md"} <= set(PAGES_WITH_COMMANDS)


SECTIONS = ("The update", "Settings", "Memory and cost", "When to choose it", "What we measured", "Reference")


def test_method_pages_have_the_same_structure() -> None:
    for page in sorted((ROOT / "docs" / "methods").glob("*.md")):
        if page.name != "README.md":
            found = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert set(SECTIONS) <= set(found), f"{page.name} lacks {set(SECTIONS) - set(found)}"


def test_every_benchmark_has_a_page() -> None:
    overview = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for benchmark in BENCHMARKS:
        assert re.search(rf"\[`{benchmark}(:PATH)?`\]\(\S+\.md\)", overview), benchmark


DRAWINGS = {  # script: the page that shows its drawing
    "draw_architecture.py": "architecture.md",
    "draw_concepts.py": "concepts.md",
}


@pytest.mark.parametrize("script", DRAWINGS)
def test_drawings_are_up_to_date(script: str, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="the drawings need matplotlib: pip install matplotlib")
    subprocess.run([sys.executable, ROOT / "scripts" / script, "--out", tmp_path], check=True, capture_output=True)
    page = (ROOT / "docs" / DRAWINGS[script]).read_text(encoding="utf-8")
    shown = set(re.findall(r"\(images/(\S+\.svg)\)", page))
    drawn = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert drawn.keys() == shown
    for name, svg in drawn.items():
        text = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        if f"Matplotlib v{matplotlib.__version__}," in text:  # another version may draw differently
            number = r"-?\d+\.\d+"
            assert re.sub(number, "", svg) == re.sub(number, "", text), f"{name}: run scripts/{script}"
            places, others = ([float(value) for value in re.findall(number, each)] for each in (svg, text))
            assert places == pytest.approx(others, abs=0.01), f"{name}: run scripts/{script}"


def test_every_drawing_has_a_script() -> None:
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in DRAWINGS.values())
    assert all(f"(images/{file.name})" in pages for file in (ROOT / "docs" / "images").glob("*.svg"))


def reference_names(page: str | None = None) -> list[str]:
    """The full names in docs/api.md, or in a part of it."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8") if page is None else page
    return re.findall(r"^::: (\S+)$", page, re.MULTILINE)


def recipes_and_interface() -> str:
    """The pages that refer to the parts."""
    recipes = [ROOT / "docs" / "recipes" / f"own-{kind}.md" for kind in ("method", "benchmark")]
    return "".join(file.read_text(encoding="utf-8") for file in (*recipes, ROOT / "src/steppe/methods/base.py"))


def test_reference_has_every_public_name() -> None:
    page, _, parts = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("\n## Building blocks\n")
    places = {name.rpartition(".")[2]: name.rpartition(".")[0] for name in reference_names(page)}
    assert set(places) == set(steppe.__all__) - {"__version__"}
    parts = parts.partition("\n## Integrations\n")[0]
    for name, module in places.items():
        assert getattr(importlib.import_module(module), name) is getattr(steppe, name)
    used = [name for name in reference_names(parts) if name.rpartition(".")[2] in recipes_and_interface()]
    assert used == reference_names(parts), "parts that no recipe and no interface speaks of"


def test_members_in_the_reference_exist() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (\S+)\n    options:\n(?:      .+\n)*?      members: \[(.+)\]$", page, re.MULTILINE)
    assert {"steppe.learning.learner.Learner", "steppe.projection.memory.GradientMemory"} <= dict(shown).keys()
    for name, members in shown:
        described = resolved(name)
        if not isinstance(described, steppe.UsageError):
            assert [member for member in members.split(", ") if not hasattr(described, member)] == []


def build(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build the site like `make docs`. Not with --quiet: warnings that are not printed do not count as errors."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="the site needs mkdocs: pip install 'steppe[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out), *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(out)
    assert done.returncode == 0, done.stderr
    return out


def test_broken_links_break_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    settings = tmp_path / "mkdocs.yml"
    settings.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nnav: [index.md]\nplugins: []\nextra_css: []\n"
    )
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[a page](other.md), [a heading](#heading)\n")
    done = build(tmp_path / "site", "--config-file", str(settings))
    assert done.returncode == 1
    assert "'other.md'" in done.stderr
    assert "'#heading'" in done.stderr


def test_site_has_a_page_for_every_document(site: Path) -> None:
    for document in (ROOT / "docs").rglob("*.md"):
        page = document.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (page.with_name("index.html") if page.stem == "README" else page)).is_file(), page


def test_reference_is_filled_from_the_docstrings(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    starts = {name: page.index(f'id="{name}"') for name in reference_names()}
    assert list(starts.values()) == sorted(starts.values())
    ends = [*list(starts.values())[1:], len(page)]
    for (name, start), end in zip(starts.items(), ends, strict=True):
        described = resolved(name)
        if isinstance(described, steppe.UsageError):
            continue
        first_words = (described.__doc__ or "").split("`")[0].split("\n")[0]
        assert html.escape(first_words[:40], quote=False) in page[start:end], name
    for name, help_and_limits in {
        "steppe.methods.fs_dgpm.FSDGPM": "SGD learning rate (η3). Above 0.",
        "steppe.methods.er.ER": "SGD momentum. At least 0 and below 1.",  # inherited
        "steppe.benchmarks.rotated_mnist.RotatedMNIST": "Training samples of each task. At least 1 and at most 60000.",
    }.items():
        shown = re.sub(r"<[^>]+>", "", page[starts[name] : min(start for start in ends if start > starts[name])])
        assert help_and_limits in shown
        assert "setting(" not in shown


def test_site_needs_no_network(site: Path) -> None:
    """No script, style, font or image comes from elsewhere."""
    elsewhere = r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?((?:https?:)?//[^\"> ]+)"
    for page in site.rglob("*.html"):
        for source in re.findall(elsewhere, page.read_text(encoding="utf-8")):
            raise AssertionError(f"{page.name}: {source}")


def test_every_figure_is_in_its_table() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "figures.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(FIGURES)


def test_citation_has_what_the_format_requires() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which mkdocs brings along")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert str(citation["version"]) == steppe.__version__
    (paper,) = citation["references"]
    assert paper.keys() >= {"type", "title", "authors"}
    assert [author["family-names"] for author in paper["authors"]] == ["Deng", "Chen", "Hao", "Wang", "Heng"]
