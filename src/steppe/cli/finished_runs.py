"""Reading of finished runs for the commands that show them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from steppe.runtime.terminal import say


def load_finished_runs(directories: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Read the results of all finished runs in these directories; report unfinished and damaged ones on stderr.

    Args:
        directories: Directories of runs or studies, which may overlap.

    Returns:
        The results by run directory.
    """
    from steppe.experiments.run_directory import read_results

    found: dict[Path, tuple[Path, dict[str, Any]]] = {}
    for directory in directories:
        results, unfinished, damaged = read_results(directory)
        for path, result in results.items():
            found.setdefault(path.resolve(), (path, result))
        report_skipped(unfinished, damaged)
    return dict(found.values())


def report_skipped(unfinished: Iterable[Path], damaged: Mapping[Path, Exception]) -> None:
    """Report on stderr which runs are skipped, and why."""
    for path in unfinished:
        say(f"steppe: skipping {path}: the run is not finished.", file=sys.stderr)
    for error in damaged.values():
        say(f"steppe: {error} Skipping the run.", file=sys.stderr)
