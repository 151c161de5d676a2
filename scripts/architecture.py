"""What docs/architecture.md says: the order of the packages, the ways through them, the rules.

The page is the one place that states them. The test of the architecture and the drawing read them from here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
_NAMES = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Architecture:
    """The page, parsed.

    Attributes:
        rows: The packages (and root modules) of each row of the table, from the top down.
        texts: What each row's packages hold.
        apart: Pairs of packages of which the first never imports the second.
        root_modules: How many modules may lie at the root.
        torch_internals: Where private names of torch may be used: packages, folders and files.
        forbidden: Words that never occur in the source.
        ways: The files on the way of a study, a run, a task and a batch, step by step.
        paths: Every file the page names.
    """

    rows: list[list[str]]
    texts: list[str]
    apart: set[tuple[str, str]]
    root_modules: int
    torch_internals: list[str]
    forbidden: list[str]
    ways: dict[str, list[list[str]]]
    paths: list[str]

    @property
    def level(self) -> dict[str, int]:
        """Each package's height; packages of one row have the same."""
        return {name: height for height, row in enumerate(reversed(self.rows)) for name in row}


def read(text: str | None = None) -> Architecture:
    """Parse the page, or another text of its form."""
    text = PAGE.read_text(encoding="utf-8") if text is None else text
    sections = dict(part.partition("\n")[::2] for part in text.split("\n## ")[1:])
    table = _rows(sections["Packages"])
    rules = [" ".join(rule.split()) for rule in re.findall(r"^- (.+?)(?=^- |\n\n)", sections["Rules"], re.M | re.S)]
    (root,) = [int(number) for rule in rules for number in re.findall(r"At most (\d+) modules", rule)]
    return Architecture(
        rows=[_NAMES.findall(names) for names, _ in table],
        texts=[text for _, text in table],
        apart={pair for rule in rules for pair in _apart(rule)},
        root_modules=root,
        torch_internals=[name for names, _ in _rows(sections["Rules"]) for name in _NAMES.findall(names)],
        forbidden=[name for rule in rules for name in _NAMES.findall(rule.partition("never contains:")[2])],
        ways={name.removeprefix("One "): _steps(part) for name, part in sections.items() if name.startswith("One ")},
        paths=re.findall(r"`((?:\w+/)+\w+\.py)`", text.replace("`tests/", "").replace("`scripts/", "")),
    )


def _apart(rule: str) -> set[tuple[str, str]]:
    importers, found, imported = rule.partition(" never import ")
    if not found:
        return set()
    first = _NAMES.findall(importers)
    second = first if imported.startswith("each other") else _NAMES.findall(imported)
    return {(one, other) for one in first for other in second if one != other}


def _rows(section: str) -> list[tuple[str, str]]:
    """The rows of a table whose first column has names."""
    return re.findall(r"^\| (`.+?) \| (.+?) \|$", section, re.MULTILINE)


def _steps(section: str) -> list[list[str]]:
    """The files of each numbered step."""
    return [re.findall(r"`((?:\w+/)+\w+\.py)`", step) for step in re.findall(r"^\d+\. (.+)$", section, re.MULTILINE)]
