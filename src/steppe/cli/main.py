"""The entry point of the command line: commands, errors, exit codes."""

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

from steppe.cli import data, figures, landscape, listing, report, reproduce, resume, run, search, show, study
from steppe.cli.commands import Commands
from steppe.errors import SteppeError, one_line, os_error_text
from steppe.runtime.signals import Terminated, raise_on_termination
from steppe.runtime.terminal import escape_controls, say
from steppe.version import __version__

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words after `steppe`; None takes them from `sys.argv`.

    Returns:
        The exit code: 0 for success, 1 for failure, 2 for invalid use, 130 or 143 if interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print ? for characters that the terminal cannot show
            stream.reconfigure(errors="replace")
    options = build_parser().parse_args(arguments)
    try:
        with raise_on_termination():
            code: int = options.action(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # report a full disk here; the interpreter would do it at exit
    except KeyboardInterrupt as stop:
        cause, number = ("SIGTERM", signal.SIGTERM) if isinstance(stop, Terminated) else ("Ctrl-C", signal.SIGINT)
        say(f"steppe: interrupted by {cause}; {options.resume_hint}", file=sys.stderr)
        return 128 + number
    except BrokenPipeError:  # the reader of the output has exited, as in `| head`
        return 1
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        say(f"steppe: {_describe_error(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, SteppeError) else 1
    finally:
        _discard_output()
    return code


def _discard_output() -> None:
    """Discard output that cannot be written; the interpreter would try again at exit and print a traceback."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe_error(error: Exception) -> str:
    """Describe an error in one line."""
    if isinstance(error, SteppeError):
        return one_line(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {os_error_text(error)}."
    if isinstance(error, OSError) and error.errno in _FULL:  # stdout; other files have a name
        return f"cannot write to standard output: {os_error_text(error)}; free some space or redirect the output."
    if isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error):
        return "out of memory; use smaller tasks, batches or buffers."
    return f"internal error: {type(error).__name__}: {one_line(error)}; rerun with --debug for the traceback."


class _Parser(argparse.ArgumentParser):
    """Reports invalid arguments in one line, like all other errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"steppe: {escape_controls(' '.join(message.splitlines()))} (see {self.prog} --help).\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(
        prog="steppe",
        description="Train neural networks on a sequence of tasks without forgetting the earlier ones.",
        epilog="get started: steppe run pmnist fs-dgpm",
    )
    parser.add_argument("--version", action="version", version=f"steppe {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    commands = Commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    for command in (run, study, search, resume, reproduce, listing, show, report, figures, landscape, data):
        command.add(commands)
    return parser
