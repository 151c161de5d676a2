"""`steppe show`: a finished run or study."""

from __future__ import annotations

import argparse
from pathlib import Path

from steppe.commands.finished import finished_runs
from steppe.commands.parsing import Commands

_EXAMPLES = """\
examples:
  steppe show runs/pmnist-fs-dgpm-seed0     one run: figures, settings, accuracy matrix
  steppe show study                         a study: its table
  steppe show study --details               forgetting, ranks of the bases, importances, time and memory as well
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    parser = commands.add("show", "Show a finished run or study.", _show, _EXAMPLES)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's or a study's directory")
    parser.add_argument(
        "--details",
        action="store_true",
        help="instead, a table of accuracies, forgetting, ranks of the bases, importances, time and memory",
    )


def _show(options: argparse.Namespace) -> int:
    from steppe.details import details
    from steppe.runs import RESULT
    from steppe.tables import markdown, run_report

    runs = finished_runs([options.directory])
    if (options.directory / RESULT).exists() and not options.details:
        print(run_report(runs[options.directory]), end="")
        return 0
    for benchmark in dict.fromkeys(result["benchmark"] for result in runs.values()):
        own = {path: result for path, result in runs.items() if result["benchmark"] == benchmark}
        print(f"{benchmark}\n")
        print(details(own) if options.details else markdown(list(own.values())))
    return 0
