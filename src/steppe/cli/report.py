"""`steppe report`: finished runs as one page for the browser."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from steppe.cli.options import Commands, given_path, name_left_out
from steppe.runtime.files import require_inside
from steppe.runtime.terminal import say

_EXAMPLES = """\
examples:
  steppe report runs/pmnist-fs-dgpm-seed0                one run
  steppe report study -o study.html                      a study: table, differences, curves, matrices
  steppe report pmnist-study cifar-study -o both.html    several benchmarks, a tab each
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    parser = commands.add("report", "Write finished runs as one page for the browser.", _report, _EXAMPLES)
    parser.add_argument("directories", nargs="+", type=given_path, metavar="DIR", help="runs or studies")
    parser.add_argument(
        *("-o", "--out"),
        type=given_path,
        metavar="FILE",
        help="the page (default: report.html)",
    )


def _report(options: argparse.Namespace) -> int:
    from steppe.report.finished_run import collect
    from steppe.report.page import write_page

    out = options.out or require_inside(Path(), Path("report.html"))  # the directory we are in may be somebody else's
    collected = collect(options.directories)
    name_left_out(collected.unfinished, collected.damaged)
    words = ["steppe", "report", *map(str, options.directories), "-o", str(out)]
    write_page(collected, out, shlex.join(words))
    say(f"wrote {out}: open it in a browser")
    return 0
