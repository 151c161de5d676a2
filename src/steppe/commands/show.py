"""`steppe show`: a finished run or study."""

from __future__ import annotations

import argparse
from pathlib import Path

from steppe.commands.finished import finished_results
from steppe.commands.parsing import Commands

_EXAMPLES = """\
examples:
  steppe show runs/pmnist-fs-dgpm-seed0     one run: figures, settings, accuracy matrix
  steppe show study                         a study: its table
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    parser = commands.add("show", "Show a finished run or study.", _show, _EXAMPLES)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's or a study's directory")


def _show(options: argparse.Namespace) -> int:
    from steppe.runs import RESULT
    from steppe.tables import markdown, run_report

    results = finished_results([options.directory])
    if (options.directory / RESULT).exists():
        print(run_report(results[0]), end="")
        return 0
    for benchmark in dict.fromkeys(result["benchmark"] for result in results):
        print(f"{benchmark}\n")
        print(markdown([result for result in results if result["benchmark"] == benchmark]))
    return 0
