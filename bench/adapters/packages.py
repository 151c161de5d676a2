"""Real labeled text: one line of description for each Debian package, labeled with the section it is in.

apt-cache dumpavail > packages.txt
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TASKS = (
    ("games", "graphics", "sound", "video"),
    ("python", "perl", "ruby", "java"),
    ("science", "math", "gnu-r", "fonts"),
    ("admin", "net", "mail", "web"),
    ("gnome", "kde", "x11", "interpreters"),
    ("devel", "editors", "text", "database"),
)
SIZES = {"train": 80, "val": 40, "test": 75}  # of each section
_BESIDES = re.compile(r"-(doc|dev|dbg|data|common|examples|l10n)$")


class Text(NamedTuple):
    """Descriptions, and the number of each one's section over all tasks."""

    lines: list[str]
    labels: list[int]


def read_tasks(file: Path, seed: int) -> list[dict[str, Text]]:
    """The training, validation and test texts of each task, drawn by seed.

    Raises:
        ValueError: The file has too few packages of a section.
    """
    by_section: dict[str, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for name, section, line in _read(file):
        start = line.lower().split(" - ")[0]
        if not _BESIDES.search(name) and start not in seen:  # variants of one package share their description
            seen.add(start)
            by_section[section].append(line)
    draw, tasks = random.Random(seed), []
    for number, sections in enumerate(TASKS):
        parts: dict[str, Text] = {part: Text([], []) for part in SIZES}
        for place, section in enumerate(sections):
            lines = sorted(by_section[section])
            if len(lines) < sum(SIZES.values()):
                raise ValueError(
                    f"{file} has {len(lines)} packages in section {section}, expected {sum(SIZES.values())}"
                )
            draw.shuffle(lines)
            for part, count in SIZES.items():
                parts[part].lines.extend(lines[:count])
                parts[part].labels.extend([len(sections) * number + place] * count)
                lines = lines[count:]
        tasks.append(parts)
    return tasks


def _read(file: Path) -> Iterator[tuple[str, str, str]]:
    """Name, section and description of each package."""
    for paragraph in file.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Section|Description(?:-en)?): (.+)$", paragraph, re.MULTILINE))
        line = fields.get("Description", fields.get("Description-en"))
        if line and "Section" in fields:
            yield fields["Package"], fields["Section"].rpartition("/")[2], line
