"""The results of finished runs, wherever in the named directories they lie."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def finished_results(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of all finished runs in these directories; unfinished ones are named."""
    from steppe.runs import read_result, runs_within

    found = []
    for directory in directories:
        finished, unfinished = runs_within(directory)
        found += [read_result(path) for path in finished]
        for path in unfinished:
            print(f"steppe: {path} is unfinished and left out.", file=sys.stderr)
    return found
