"""`steppe figures`: pictures from finished runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steppe.cli.options import Commands, finished_runs, given_path, task_numbers
from steppe.errors import UsageError
from steppe.figures import FIGURES, Choices
from steppe.runtime.files import require_inside
from steppe.runtime.terminal import say

_EXAMPLES = """\
examples:
  steppe figures forgetting study                     forgetting.pdf, .svg and .png, here
  steppe figures comparison study -o figure4.pdf      that file alone
  steppe figures landscapes study --task 5 --after 5,10 --methods er,fs-dgpm
  steppe figures memory-size study study-500 study-50 -o paper/memory
  steppe figures --list                               what each figure needs
  steppe figures --list study                         and what of it a study lacks
"""


def add(commands: Commands) -> None:
    """Make the command known."""
    known = "\n".join(f"  {figure.name:<15} {figure.text}" for figure in FIGURES.values())
    parser = commands.add("figures", "Draw a figure from finished runs.", _figures, f"figures:\n{known}\n\n{_EXAMPLES}")
    figure = parser.add_argument("figure", choices=tuple(FIGURES), metavar="NAME", help="which figure (see below)")
    directories = parser.add_argument("directories", nargs="+", type=given_path, metavar="DIR", help="runs or studies")
    parser.add_argument(
        "-o", "--out", type=given_path, metavar="FILE",
        help="a .pdf, .svg or .png file, or a name without suffix for all three (default: the figure's, here)",
    )  # fmt: skip
    parser.add_argument("--methods", metavar="M,M,…", help="only these methods, in this order")
    parser.add_argument("--task", metavar="N,N,…", help="which task or tasks, from 1, where a figure asks")
    parser.add_argument("--after", metavar="N,N,…", help="after which task or tasks, where a figure asks")
    parser.add_argument(
        "--list", action=_Instead, waived=(figure, directories), nargs="*", type=given_path, metavar="DIR",
        help="say what each figure needs, and what of it these directories lack",
    )  # fmt: skip


class _Instead(argparse.Action):
    """An option in whose presence other arguments need not be given."""

    def __init__(self, *arguments: Any, waived: Sequence[argparse.Action], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waived = waived

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for action in self._waived:
            action.required = False
        setattr(namespace, self.dest, values)


def _figures(options: argparse.Namespace) -> int:
    from steppe.figures.output import files_for, save
    from steppe.figures.reading import Run

    choices = Choices(
        tasks=task_numbers("--task", options.task),
        afters=task_numbers("--after", options.after),
        methods=None if options.methods is None else tuple(dict.fromkeys(options.methods.split(","))),
    )
    given = options.directories if options.list is None else options.list
    runs = [Run(path, result) for path, result in finished_runs(given or []).items()]
    if options.list is not None:
        say("\n".join(line for name in FIGURES for line in _described(name, runs, choices)))
        return 0
    files = files_for(options.out, options.figure)
    if options.out is None:  # the directory we are in may be somebody else's
        files = [require_inside(Path(), file) for file in files]
    save(FIGURES[options.figure].drawn(runs, choices), files)
    say(f"wrote {', '.join(map(str, files))}")
    return 0


def _described(name: str, runs: Sequence[Any], choices: Choices) -> list[str]:
    """What a figure shows and needs and, where there are runs, what they lack."""
    figure = FIGURES[name]
    lines = [f"{name}: {figure.text}", f"  needs: {figure.needs}"]
    if runs:
        try:
            lacking = figure.missing(choices.of(runs), choices)
        except UsageError as error:
            lacking = [str(error)]
        lines += [f"  missing: {problem}" for problem in lacking] or ["  nothing is missing"]
    return lines
