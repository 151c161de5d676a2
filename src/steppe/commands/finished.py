"""Finished runs, wherever in the named directories they lie."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def finished_runs(directories: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """The results of all finished runs in these directories, each once, by their own; unfinished ones are named."""
    from steppe.runs import read_result, runs_within

    found: dict[Path, Path] = {}
    for directory in directories:
        finished, unfinished = runs_within(directory)
        for path in finished:
            found.setdefault(path.resolve(), path)
        for path in unfinished:
            print(f"steppe: {path} is unfinished and left out.", file=sys.stderr)
    return {path: read_result(path) for path in found.values()}
