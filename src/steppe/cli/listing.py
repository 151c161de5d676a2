"""`steppe list`: list methods and benchmarks."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files

from steppe.cli.commands import Commands
from steppe.cli.options import add_plugin_option
from steppe.errors import unknown_name

_EXAMPLES = """\
examples:
  steppe list                            all methods and benchmarks
  steppe list fs-dgpm                    settings, presets, published results
  steppe list anchor --plugin anchor.py  your own method
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add("list", "List methods and benchmarks, or the settings of one.", _list, _EXAMPLES)
    parser.add_argument("name", nargs="?", metavar="NAME", help="method or benchmark")
    add_plugin_option(parser)


def _list(options: argparse.Namespace) -> int:
    if options.plugin:
        from steppe.cli.catalogue import render
        from steppe.experiments.plugins import load_plugins

        load_plugins(options.plugin)
        print(render(options.name))
        return 0
    pages = json.loads(files("steppe").joinpath("catalogue.json").read_text(encoding="utf-8"))
    if (options.name or "") not in pages:
        raise unknown_name("method or benchmark", options.name, [name for name in pages if name])
    print(pages[options.name or ""])
    return 0
