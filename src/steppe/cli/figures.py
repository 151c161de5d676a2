"""`steppe figures`: draw figures from finished runs."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steppe.cli.commands import Commands
from steppe.cli.finished_runs import load_finished_runs
from steppe.cli.options import parse_path, parse_task_numbers
from steppe.errors import UsageError
from steppe.figures import FIGURES, Choices
from steppe.runtime.files import require_inside
from steppe.runtime.terminal import say

_EXAMPLES = """\
examples:
  steppe figures forgetting study                 forgetting.pdf, .svg and .png
  steppe figures comparison study -o figure4.pdf  only this file
  steppe figures landscapes study --task 5 --after 5,10 --methods er,fs-dgpm
  steppe figures memory-size study study-500 study-50 -o paper/memory
  steppe figures --list                           what each figure needs
  steppe figures --list study                     what a study lacks
"""


def add(commands: Commands) -> None:
    """Add the command."""
    known = "\n".join(_wrap(figure.name, figure.text) for figure in FIGURES.values())
    parser = commands.add("figures", "Draw a figure from finished runs.", _figures, f"figures:\n{known}\n\n{_EXAMPLES}")
    figure = parser.add_argument("figure", choices=tuple(FIGURES), metavar="NAME", help="the figure (see below)")
    directories = parser.add_argument(
        "directories", nargs="+", type=parse_path, metavar="DIR", help="run or study directories"
    )
    parser.add_argument(
        "-o", "--out", type=parse_path, metavar="FILE",
        help=".pdf, .svg or .png file; without a suffix, all three (default: the figure's name)",
    )  # fmt: skip
    parser.add_argument("--methods", metavar="M,M,…", help="include only these methods, in this order")
    parser.add_argument("--task", metavar="N,N,…", help="tasks to show, counted from 1, for figures of single tasks")
    parser.add_argument("--after", metavar="N,N,…", help="show the networks after these tasks, for landscapes")
    parser.add_argument(
        "--list", action=_WaivesArguments, waived=(figure, directories), nargs="*", type=parse_path, metavar="DIR",
        help="list the figures, what they need, and what is missing in these directories",
    )  # fmt: skip


def _wrap(name: str, text: str) -> str:
    return textwrap.fill(text, 79, initial_indent=f"  {name:<15} ", subsequent_indent=18 * " ")


class _WaivesArguments(argparse.Action):
    """An option that makes other arguments optional."""

    def __init__(self, *arguments: Any, waived: Sequence[argparse.Action], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waived = waived

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for action in self._waived:
            action.required = False
        setattr(namespace, self.dest, values)


def _figures(options: argparse.Namespace) -> int:
    from steppe.figures.output import output_files, save

    choices = Choices(
        tasks=parse_task_numbers("--task", options.task),
        afters=parse_task_numbers("--after", options.after),
        methods=None if options.methods is None else tuple(dict.fromkeys(options.methods.split(","))),
    )
    directories = options.directories if options.list is None else options.list
    runs = load_finished_runs(directories) if directories else []
    if options.list is not None:
        say("\n".join(line for name in FIGURES for line in _describe_figure(name, runs, choices)))
        return 0
    files = output_files(options.out, options.figure)
    if options.out is None:  # the current directory may be untrusted
        files = [require_inside(Path(), file) for file in files]
    save(FIGURES[options.figure].draw(runs, choices), files)
    say(f"Wrote {', '.join(map(str, files))}.")
    return 0


def _describe_figure(name: str, runs: Sequence[Any], choices: Choices) -> list[str]:
    """Describe what a figure shows and needs and, if there are runs, what they lack."""
    figure = FIGURES[name]
    lines = [f"{name}: {figure.text}", f"  needs: {figure.needs}"]
    if runs:
        try:
            problems = figure.missing(choices.filter(runs), choices)
        except UsageError as error:
            problems = [str(error)]
        lines += [f"  missing: {problem}" for problem in problems] or ["  nothing is missing"]
    return lines
