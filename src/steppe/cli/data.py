"""`steppe data`: list, fetch, verify and locate the data sets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from steppe.cli.options import Commands, add_data_option
from steppe.data import directory
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    from steppe.data.download import Progress

_EXAMPLES = """\
examples:
  steppe data                            the data sets, and whether they are there
  steppe data fetch cifar-100            fetch one; stopped half-way, the same command goes on
  steppe data verify                     read everything that is there and check it
  steppe data where                      the directory they are kept in
  steppe data fetch cifar-100 --data D   keep it in D, and run with: steppe run ... --data D
"""


def add(commands: Commands) -> None:
    """Make the command known; without a command of its own it lists."""
    parser = commands.add(
        "data",
        "List, fetch, verify and locate the data sets.",
        _list,
        _EXAMPLES,
        goes_on="the same command goes on with it",
    )
    add_data_option(parser)
    inner = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, text: str, names: str | None, example: str) -> argparse.ArgumentParser:
        sub = inner.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_data_option(sub, inner=True)
        if names is not None:
            sub.add_argument("names", nargs=names, metavar="NAME", help="a data set (see steppe data)")
        return sub

    command("list", "List the data sets.", None, "steppe data list").set_defaults(action=_list)
    fetch = command("fetch", "Fetch, check and unpack data sets.", "+", "steppe data fetch cifar-100 tiny-imagenet")
    fetch.set_defaults(action=_fetch)
    verify = command("verify", "Read data sets whole and check them.", "*", "steppe data verify cifar-100")
    verify.set_defaults(action=_verify)
    where = command("where", "Print the data directory, or where a data set is.", "?", "steppe data where cifar-100")
    where.set_defaults(action=_where)


def _list(options: argparse.Namespace) -> int:
    from steppe.data import store
    from steppe.data.catalogue import DATA_SETS

    directory.set_data_directory(options.data)
    rows = [
        (entry.name, store.describe_status(entry.name), entry.content, entry.licence) for entry in DATA_SETS.values()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    say(f"\nkept in {directory.data_directory()}; steppe data fetch NAME fetches one.")
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from steppe.data import store
    from steppe.data.catalogue import find_data_set

    directory.set_data_directory(options.data, create=True)
    for name in options.names:
        find_data_set(name)  # a name that is not known is refused before anything is fetched
    for name in options.names:
        with _shown(name) as progress:
            store.fetch(name, progress, lambda line: say(line, file=sys.stderr, flush=True))
        say(store.locate(name))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from steppe.data import store
    from steppe.data.catalogue import DATA_SETS, find_data_set

    directory.set_data_directory(options.data)
    for name in options.names:
        find_data_set(name)
    code = 0
    for name in options.names or DATA_SETS:
        if not options.names and DATA_SETS[name].archive and not store.find_copies(name):
            say(f"{name}: {store.describe_status(name)}")
            continue
        with _shown(name) as progress:
            checks = store.verify(name, progress)
        for check in checks:
            say(f"{name}: {check.path} is {'whole' if check.is_complete else 'NOT whole'}: {check.text.rstrip('.')}.")
            code = code if check.is_complete else 1
    return code


def _where(options: argparse.Namespace) -> int:
    directory.set_data_directory(options.data)
    if options.names is None:
        say(directory.data_directory())
        return 0
    from steppe.data import store

    say(store.locate(options.names))
    return 0


@contextmanager
def _shown(name: str) -> Iterator[Progress]:
    """Progress as a live bar where standard error is a terminal, as a line for each tenth where it is not."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        told = [-1]

        def line(done: int, total: int) -> None:
            tenth = 10 * done // total
            if tenth != told[0]:
                told[0] = tenth
                say(f"{name}: {10 * tenth} % of {total:,}", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
