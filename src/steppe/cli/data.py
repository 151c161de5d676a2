"""`steppe data`: list, download, verify and locate data sets."""

from __future__ import annotations

import argparse
import sys

from steppe.cli.commands import Commands
from steppe.cli.options import add_data_option
from steppe.data import directory
from steppe.data.catalogue import find_data_set
from steppe.runtime.terminal import say

_EXAMPLES = """\
examples:
  steppe data                           list the data sets and their state
  steppe data fetch cifar-100           download; rerun to resume
  steppe data verify                    check all downloaded files
  steppe data where                     print the data directory
  steppe data fetch cifar-100 --data D  store it in D; then: steppe run --data D
"""


def add(commands: Commands) -> None:
    """Add the command; without a subcommand it lists the data sets."""
    parser = commands.add(
        "data",
        "List, download, verify and locate data sets.",
        _list,
        _EXAMPLES,
        resume_hint="run the same command again to resume.",
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
            sub.add_argument("names", nargs=names, metavar="NAME", help="data set (see steppe data)")
        return sub

    command("list", "List the data sets.", None, "steppe data list").set_defaults(action=_list)
    fetch = command("fetch", "Download, verify and unpack data sets.", "+", "steppe data fetch cifar-100 tiny-imagenet")
    fetch.set_defaults(action=_fetch)
    verify = command("verify", "Verify the files of data sets.", "*", "steppe data verify cifar-100")
    verify.set_defaults(action=_verify)
    where = command("where", "Print the data directory, or the path of a data set.", "?", "steppe data where cifar-100")
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
    say(f"\nData directory: {directory.data_directory()}. Download with: steppe data fetch NAME.")
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from steppe.cli.progress import show_progress
    from steppe.data import store

    directory.set_data_directory(options.data, create=True)
    for name in options.names:
        find_data_set(name)  # report unknown names before any download
    for name in options.names:
        with show_progress(name) as progress:
            store.fetch(name, progress, lambda line: say(line, file=sys.stderr, flush=True))
        say(store.locate(name))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from steppe.cli.progress import show_progress
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
        with show_progress(name) as progress:
            checks = store.verify(name, progress)
        for check in checks:
            say(f"{name}: {check.path} is {'intact' if check.is_complete else 'DAMAGED'}: {check.text.rstrip('.')}.")
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
