"""`steppe show`: print a finished run or study."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.cli.commands import Commands
from steppe.cli.finished_runs import load_finished_runs
from steppe.cli.options import parse_path
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.results.schema import RunResult

_EXAMPLES = """\
examples:
  steppe show runs/pmnist-fs-dgpm-seed0  metrics, settings, accuracy matrix
  steppe show study                      the table of a study
  steppe show study --details            forgetting, basis ranks, time, memory
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add("show", "Print the results of a finished run or study.", _show, _EXAMPLES)
    parser.add_argument(
        "directory", type=parse_path, metavar="DIR", help="directory of a run, a study, or several studies"
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="print a table with forgetting, basis ranks, importances, time and memory",
    )


def _show(options: argparse.Namespace) -> int:
    from steppe.results.detailed_table import details
    from steppe.results.tables import markdown, run_report

    runs = {run.path: run.result for run in load_finished_runs([options.directory])}
    if options.directory in runs and not options.details:
        say(run_report(runs[options.directory]), end="")
        return 0
    studies: dict[tuple[Path, str], dict[Path, RunResult]] = {}
    for path, result in runs.items():
        studies.setdefault((_study_directory(path, result), result.benchmark), {})[path] = result
    several = len({study for study, _ in studies}) > 1
    for (study, benchmark), own in studies.items():
        say(f"{study}: {benchmark}\n" if several else f"{benchmark}\n")
        say(details(own) if options.details else markdown(list(own.values())))
    return 0


def _study_directory(run: Path, result: RunResult) -> Path:
    """Return the directory of the study that a run belongs to."""
    return run.parents[1] if run.parent.name == result.method else run.parent
