"""The command line: the program's name, its commands, its errors and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from steppe.commands import catalogue, data, figures, landscape, resume, run, show, study
from steppe.commands.parsing import Commands
from steppe.errors import SteppeError
from steppe.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: asked for wrongly, 1: failed, 130: stopped by Ctrl-C)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.action(options)
    except SteppeError as error:
        if options.debug:
            traceback.print_exc()
        print(f"steppe: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("steppe: stopped by Ctrl-C; what was finished is kept.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="steppe",
        description="Let a network learn one task after another without forgetting the earlier ones.",
        epilog="start with: steppe run pmnist fs-dgpm",
    )
    parser.add_argument("--version", action="version", version=f"steppe {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    commands = Commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    for command in (run, study, resume, catalogue, show, landscape, figures, data):
        command.add(commands)
    return parser
