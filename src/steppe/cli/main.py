"""The command line: the program's name, its commands, its errors and exit codes."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from steppe.cli import data, figures, landscape, report, reproduce, resume, run, show, study
from steppe.cli import listing as catalogue
from steppe.cli.options import Commands
from steppe.errors import SteppeError, one_line, os_error_text
from steppe.runtime.signals import Terminated, raise_on_termination
from steppe.runtime.terminal import escape_controls, say
from steppe.version import __version__

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: asked for wrongly, 1: failed, 130 or 143: stopped)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what it has no sign for is a question mark, and no reason to fail
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
    try:
        with raise_on_termination():
            code: int = options.action(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # what it cannot take is our error, not the interpreter's at its end
    except KeyboardInterrupt as stop:
        by, number = ("SIGTERM", signal.SIGTERM) if isinstance(stop, Terminated) else ("Ctrl-C", signal.SIGINT)
        say(f"steppe: stopped by {by}; {options.goes_on}.", file=sys.stderr)
        return 128 + number
    except BrokenPipeError:  # the reader of our output has gone
        return 1
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        say(f"steppe: {_told(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, SteppeError) else 1
    finally:
        _drop_what_is_left()
    return code


def _drop_what_is_left() -> None:
    """Let go of output that nobody takes: the interpreter would try again, and complain in its own words."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, SteppeError):
        return one_line(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {os_error_text(error)}."
    if isinstance(error, OSError) and error.errno in _FULL:  # files say which they are
        return f"cannot write the output: {os_error_text(error)}: make room, or send it elsewhere."
    if isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error):
        return "there is not enough memory: give smaller tasks, batches or buffers."
    return f"internal error: {type(error).__name__}: {one_line(error)}: run again with --debug."


class _Parser(argparse.ArgumentParser):
    """One line for what cannot be understood, as for every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"steppe: {escape_controls(' '.join(message.splitlines()))} (see {self.prog} --help).\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="steppe",
        description="Let a network learn one task after another without forgetting the earlier ones.",
        epilog="start with: steppe run pmnist fs-dgpm",
    )
    parser.add_argument("--version", action="version", version=f"steppe {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    commands = Commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    for command in (run, study, resume, reproduce, catalogue, show, report, figures, landscape, data):
        command.add(commands)
    return parser
