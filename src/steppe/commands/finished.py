"""Finished runs, wherever in the named directories they lie."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from steppe.terminal import say


def finished_runs(directories: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """The results of all finished runs in these directories, each once, by their own; runs that are unfinished, or have
    a damaged result, are named.
    """
    from steppe.runs import results_within

    found: dict[Path, tuple[Path, dict[str, Any]]] = {}
    for directory in directories:
        results, unfinished, damaged = results_within(directory)
        for path, result in results.items():
            found.setdefault(path.resolve(), (path, result))
        name_left_out(unfinished, damaged)
    return dict(found.values())


def name_left_out(unfinished: Iterable[Path], damaged: Mapping[Path, Exception]) -> None:
    """Say which runs are left out, and why."""
    for path in unfinished:
        say(f"steppe: {path} is unfinished and left out.", file=sys.stderr)
    for error in damaged.values():
        say(f"steppe: {error} The run is left out.", file=sys.stderr)
