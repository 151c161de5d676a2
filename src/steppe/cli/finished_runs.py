"""Reading of finished runs for the commands that show them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.report.finished_run import FinishedRun


def load_finished_runs(directories: Sequence[Path]) -> list[FinishedRun]:
    """Read all finished runs in these directories; report unfinished and damaged ones on stderr.

    Args:
        directories: Directories of runs or studies, which may overlap.

    Returns:
        The runs, each once.
    """
    from steppe.report.finished_run import collect

    collected = collect(directories)
    report_skipped(collected.unfinished, collected.damaged)
    return collected.runs


def report_skipped(unfinished: Iterable[Path], damaged: Mapping[Path, Exception]) -> None:
    """Report on stderr which runs are skipped, and why."""
    for path in unfinished:
        say(f"steppe: skipping {path}: the run is not finished.", file=sys.stderr)
    for error in damaged.values():
        say(f"steppe: {error} Skipping the run.", file=sys.stderr)
