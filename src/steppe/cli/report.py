"""`steppe report`: write finished runs as one HTML page."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from steppe.cli.commands import Commands
from steppe.cli.finished_runs import report_skipped
from steppe.cli.options import parse_path
from steppe.runtime.files import require_inside
from steppe.runtime.terminal import say

_EXAMPLES = """\
examples:
  steppe report runs/pmnist-fs-dgpm-seed0              one run
  steppe report study -o study.html                    table, curves, matrices
  steppe report pmnist-study cifar-study -o both.html  one tab per benchmark
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add("report", "Write an HTML report of finished runs.", _report, _EXAMPLES)
    parser.add_argument("directories", nargs="+", type=parse_path, metavar="DIR", help="run or study directories")
    parser.add_argument(
        *("-o", "--out"),
        type=parse_path,
        metavar="FILE",
        help="output file (default: report.html)",
    )


def _report(options: argparse.Namespace) -> int:
    from steppe.report.finished_run import collect
    from steppe.report.page import write_page

    out = options.out or require_inside(Path(), Path("report.html"))  # the current directory may be untrusted
    collected = collect(options.directories)
    report_skipped(collected.unfinished, collected.damaged)
    words = ["steppe", "report", *map(str, options.directories), "-o", str(out)]
    write_page(collected, out, shlex.join(words))
    say(f"Wrote {out}; open it in a browser.")
    return 0
