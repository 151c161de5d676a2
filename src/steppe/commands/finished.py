"""Finished runs and their results, wherever in the named directories they lie."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steppe.errors import UsageError


def finished_runs(directories: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """The results of all finished runs in these directories, each once, by their own; unfinished ones are named."""
    from steppe.runs import CONFIG, RESULT, read_result

    found: dict[Path, Path] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory: give a run's or a study's.")
        inner = sorted(file.parent for file in directory.rglob(RESULT))
        unfinished = sorted({config.parent for config in directory.rglob(CONFIG)} - set(inner))
        if not inner:
            state = f"{len(unfinished)} unfinished run(s) and no finished one" if unfinished else "no run"
            raise UsageError(f"{directory} holds {state}: there is nothing to show.")
        for path in inner:
            found.setdefault(path.resolve(), path)
        for path in unfinished:
            print(f"steppe: {path} is unfinished and left out.", file=sys.stderr)
    return {path: read_result(path) for path in found.values()}


def finished_results(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """The same, without saying where."""
    return list(finished_runs(directories).values())
