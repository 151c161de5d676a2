"""No result in the documents is typed by hand.

Results are at marked places, which scripts/fill_results.py fills and checks. Any other number in the prose that has a
decimal point, or counts points, percent, times, seconds or bytes, must be a setting's value, be in code or a formula,
or have its reason here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from filling.places import BLOCK, VALUE, fill_places

from steppe.experiments.run_directory import read_result
from steppe.landscape.settings import LandscapeSettings
from steppe.registry import BENCHMARKS, METHODS
from steppe.settings import TrainingConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

REASONS = {
    "README.md": {"3.11": "Python's version", "3.13": "Python's version", "3.0": "a licence's version"},
    "docs/data.md": {
        "3.0": "a licence's version",
        "169": "the publisher's archive",
        "248": "the publisher's archive",
        "184": "60,000 images of 3,072 bytes",
    },
    "docs/figures.md": {"6.5": "the size of letters", "7.5": "the size of letters"},
    "docs/index.md": {"3.11": "Python's version", "3.13": "Python's version"},
    "docs/methods/er.md": {"1902.10486": "a number of arXiv's"},
    "docs/performance.md": {"51": "values of α, a setting of landscapes"},
    "docs/reliability.md": {
        "32": "a limit on the size of files",
        "64": "a limit on the size of files",
        "100": "a limit on the size of files",
        "300": "the limit that the fuzzer sets",
    },
    "docs/report.md": {"0.05": "the level of the tests", "5": "the level of the tests"},
    "docs/results.md": {"0.0001": "tested below"},
}

_NO_PROSE = [
    BLOCK,
    VALUE,
    re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE),  # code
    re.compile(r"(?<=\n\n)(?: {4}.*\n|\n)+"),  # formulas
    re.compile(r"(`+)[^`]+?\1"),
    re.compile(r"\]\([^)]*\)"),  # link targets
]
_UNIT = r"(?:points?|percent|times|seconds?|minutes?|hours?|ms|[kMG]i?B)\b|%"
_NUMBER = re.compile(rf"(?<![\w.,])(?:\d[\d,]*)?\.\d+|(?<![\w.,])\d[\d,]*(?=\s*(?:{_UNIT}))")


def typed_numbers(text: str) -> list[str]:
    """The numbers in a document's prose and tables that no script put there."""
    for pattern in _NO_PROSE:
        text = pattern.sub(lambda place: "\n\n" if "\n" in place[0] else " ", text)
    return _NUMBER.findall(text)


def settings_on(page: Path) -> set[float]:
    """The values of settings that a page may mention: those of the methods or benchmarks that it describes."""
    found: list[object] = []
    if page.name in ("landscapes.md", "results.md"):
        found += LandscapeSettings().as_dict().values()
    if page.parent.name == "benchmarks":
        found += TrainingConfig().as_dict().values()
    for name in _described_on(page):
        if name in METHODS:
            entry = METHODS[name]
            for benchmark in ("", *entry.presets):
                found += entry.settings.from_mapping(entry.values(benchmark)).as_dict().values()
        else:
            settings: Any = BENCHMARKS[name].settings
            found += [field.default for field in fields(settings)]
            found += settings.training.as_dict().values()
    return set(_numbers(found))


def _described_on(page: Path) -> list[str]:
    """The methods or benchmarks whose page this is, by the overview."""
    overview = page.parent / "README.md"
    if page.parent.name not in ("methods", "benchmarks"):
        return []
    links = re.findall(rf"\[([^\]]+)\]\({re.escape(page.name)}\)", overview.read_text(encoding="utf-8"))
    return [name.partition(":")[0] for name in re.findall(r"`([^`]+)`", " ".join(links))]


def _numbers(values: Iterable[object]) -> Iterable[float]:
    for value in values:
        for part in str(value).split(","):  # thresholds of several layers
            if re.fullmatch(r"[\d.]+(e-?\d+)?", part) and float(part):
                yield float(part)


def unexplained(page: Path, text: str) -> list[str]:
    """The typed numbers that are neither a setting's value with a decimal point nor have a reason."""
    reasons, settings = REASONS.get(page.relative_to(ROOT).as_posix(), {}), settings_on(page)
    left = [found for found in typed_numbers(text) if found not in reasons]
    return [found for found in left if "." not in found or float(found.replace(",", "")) not in settings]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_result_is_typed_by_hand(page: Path) -> None:
    left = unexplained(page, page.read_text(encoding="utf-8"))
    assert not left, "mark their places as scripts/fill_results.py says, or give their reasons in this file"


def test_reasons_are_needed() -> None:
    for name, reasons in REASONS.items():
        assert reasons.keys() <= set(typed_numbers((ROOT / name).read_text(encoding="utf-8"))), name


def test_values_are_marked_within_lines() -> None:
    """A line that begins with a comment ends the paragraph in Markdown."""
    for page in DOCUMENTS:
        assert not re.search(r"^\s*(?:[-*] )?<!-- result:", page.read_text(encoding="utf-8"), re.MULTILINE), page


@pytest.mark.parametrize(
    "sentence",
    [
        "ER reaches 68.4 on average.",
        "| er | 68.37 |",
        "It is 14 points better,",
        "a rise of\n7\npercent",
        "in 1,200 seconds",
        "needs 12 MB",
        "by .07",
        "(85 %)",
        "-3.21",
        "twice **3.5**",
    ],
)
def test_typed_claims_are_found(sentence: str) -> None:
    assert len(unexplained(ROOT / "docs" / "concepts.md", f"# A page\n\n{sentence}\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`lr=0.25`",
        "```text\nACC 77.88\n```",
        "so\n\n    x = 0.25 y\n\nholds",
        "[here](a-0.25.md)",
        "20 tasks",
        "v1.2.3",
    ],
)
def test_code_formulas_and_links_are_ignored(text: str) -> None:
    assert typed_numbers(f"# A page\n\n{text}\n") == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_changed_numbers_are_found(page: Path) -> None:
    """In any marked place; and a value without its mark counts as typed."""
    text = page.read_text(encoding="utf-8")
    places = [match.span(3) for pattern in (BLOCK, VALUE) for match in pattern.finditer(text)]
    for start, end in places:
        number = re.search(r"\d(?=\D|$)", text[start:end])
        assert number is not None
        at = start + number.start()
        changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        assert fill_places(changed) != changed
    if any(VALUE.finditer(text)):
        assert typed_numbers(VALUE.sub(lambda place: place[3], text)) != typed_numbers(text)


def test_what_was_reproduced() -> None:
    """README and docs/results.md: every ACC is within two of the published standard deviations, or better."""
    table = json.loads((ROOT / "results" / "pmnist" / "table.json").read_text(encoding="utf-8"))
    compared = 0
    for row in table["rows"]:
        for source in ("paper", "released"):
            if figure := row[source].get("acc"):
                assert row["acc"]["mean"] >= figure["mean"] - 2 * figure["std"], (row["method"], source)
                compared += 1
    assert compared >= 10


def test_the_papers_importances_are_inert() -> None:
    """docs/results.md: λ never differs from 1 by more than 0.0001, in any run with the paper's rule."""
    lowest = []
    for file in sorted((ROOT / "results").rglob("log.jsonl")):
        if read_result(file.parent).config["method"].get("importance") == "sigmoid":
            for line in file.read_text(encoding="utf-8").splitlines():
                layers = (json.loads(line).get("method") or {}).get("importances", {})
                lowest += [layer["deciles"][0] for layer in layers.values()]
    assert len(lowest) > 1000
    assert min(lowest) >= 1 - 0.0001
