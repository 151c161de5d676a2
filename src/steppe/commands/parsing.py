"""What the commands' parsers share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from steppe.data_cli import add_data_option

if TYPE_CHECKING:
    _Parsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["Action", "Commands", "add_data_option"]

Action = Callable[[argparse.Namespace], int]


class Commands:
    """The commands known so far; each file adds its own."""

    def __init__(self, parsers: _Parsers) -> None:
        self._parsers = parsers

    def add(self, name: str, text: str, action: Action, examples: str = "") -> argparse.ArgumentParser:
        """A command's parser, whose arguments its file fills in; `action` gets them and gives the exit code."""
        parser = self._parsers.add_parser(
            name, help=text, description=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.set_defaults(action=action)
        return parser
