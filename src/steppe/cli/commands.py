"""The registry of subcommands; each command's file adds its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Parsers = argparse._SubParsersAction[Any]

Action = Callable[[argparse.Namespace], int]


class Commands:
    """The subcommands of `steppe`."""

    def __init__(self, parsers: _Parsers) -> None:
        self._parsers = parsers

    def add(
        self,
        name: str,
        text: str,
        action: Action,
        examples: str = "",
        *,
        resume_hint: str = "the same command starts over",
    ) -> argparse.ArgumentParser:
        """Add a subcommand.

        Args:
            name: The name.
            text: One sentence for the help.
            action: Called with the parsed options; returns the exit code.
            examples: The end of the help.
            resume_hint: What to tell a user who interrupts the command.

        Returns:
            The subcommand's parser, for its arguments.
        """
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name, help=text, description=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Also accepted before the command; SUPPRESS keeps this default from overwriting that value.
        parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
        parser.set_defaults(action=action, resume_hint=resume_hint)
        return parser
