"""`steppe figures`: pictures from finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from steppe.commands.finished import finished_results
from steppe.commands.parsing import Commands

_EXAMPLES = """\
examples:
  steppe figures forgetting runs/pmnist-fs-dgpm-seed0 -o forgetting.png
  steppe figures forgetting study -o forgetting.pdf       every run of a study, averaged over seeds
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    parser = commands.add("figures", "Draw a figure from finished runs.", _figures, _EXAMPLES)
    parser.add_argument("figure", choices=("forgetting",), help="which figure")
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="runs or studies")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="a .png, .pdf or .svg file")


def _figures(options: argparse.Namespace) -> int:
    from steppe.figures import FIGURES

    FIGURES[options.figure](finished_results(options.directories), options.out)
    print(f"wrote {options.out}")
    return 0
