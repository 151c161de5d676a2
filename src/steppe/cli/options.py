"""What the commands' parsers share."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.errors import UsageError
from steppe.runtime.files import expand_path
from steppe.runtime.terminal import say

if TYPE_CHECKING:
    _Parsers = argparse._SubParsersAction[Any]

_MAX_SEEDS = 10_000
_MAX_DIGITS = 18  # of a seed, which has 63 bits
OWN_PLUGIN = "a Python file that registers methods or benchmarks of your own"
PLUGIN_OF_RUN = (
    "a plugin that the run was made with: it is code, and only runs if you name it; the file may have moved, but must "
    "have its old name"
)
SEEDS = "seeds 0 to N-1; or the first and the last, such as 5-9"

Action = Callable[[argparse.Namespace], int]


class Commands:
    """The commands known so far; each file adds its own."""

    def __init__(self, parsers: _Parsers) -> None:
        self._parsers = parsers

    def add(
        self,
        name: str,
        text: str,
        action: Action,
        examples: str = "",
        *,
        goes_on: str = "the same command does it anew",
    ) -> argparse.ArgumentParser:
        """A command's parser, whose arguments its file fills in; `action` gets them and gives the exit code, `goes_on`
        says how to go on when it was stopped.
        """
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name, help=text, description=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # As before the command; given to neither, it must not undo what was given to the other.
        parser.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error came from"
        )
        parser.set_defaults(action=action, goes_on=goes_on)
        return parser


def parse_path(text: str) -> Path:
    """A path as users give it: ~ is their home, also where a shell leaves it as it is, as in --out=~/x. An empty one,
    as from a variable that is not set, would be the current directory.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty: name one, or write . for the current directory")
    try:
        return expand_path(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def _parse_file(text: str) -> str:
    return str(parse_path(text))


def add_plugin_option(parser: argparse.ArgumentParser, text: str = OWN_PLUGIN) -> None:
    """`--plugin FILE`."""
    parser.add_argument(
        "--plugin",
        action="append",
        type=_parse_file,
        default=[],
        metavar="FILE",
        help=text,
    )


def add_trust_option(parser: argparse.ArgumentParser, where: str) -> None:
    """`--trust-plugins`."""
    parser.add_argument("--trust-plugins", action="store_true", help=f"run whatever plugins {where} names")


def add_data_option(parser: argparse.ArgumentParser, *, inner: bool = False) -> None:
    """`--data DIR`; that of an inner command must not undo what was given to the outer one."""
    parser.add_argument(
        "--data",
        type=parse_path,
        metavar="DIR",
        default=argparse.SUPPRESS if inner else None,
        help="where the data sets are (default: STEPPE_DATA, else the user's cache directory)",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """What `run` and `study` have in common."""
    parser.add_argument(
        "--jobs", type=int, metavar="J", help="runs at a time (default: as many as there are cores, on a GPU one)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs of each task, instead of the benchmark's own")
    parser.add_argument("--tasks", type=int, metavar="N", help="the first N tasks only, instead of all")
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), help="where to compute (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each run; recorded (default: 1)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, where need be as benchmark.KEY, method.KEY or training.KEY; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with what is in the directory already, or start if nothing is"
    )
    add_checkpoint_option(parser)
    add_data_option(parser)
    add_plugin_option(parser)


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    """`--checkpoint-every MINUTES`."""
    parser.add_argument(
        "--checkpoint-every",
        type=_parse_minutes,
        default=5.0,
        metavar="MINUTES",
        help="how much of a task may be lost if the run is killed (default: 5); asked to stop, it loses nothing",
    )


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes: give 0 or more")
    return minutes


def parse_seeds(text: str) -> range:
    """The seeds that `--seeds` names: 5 are 0 to 4, and 5-9 are 5 to 9."""
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isdecimal() and len(part) <= _MAX_DIGITS for part in parts):
        raise UsageError(f"--seeds {text}: give how many, such as 5, or the first and the last, such as 5-9.")
    seeds = range(int(parts[0])) if len(parts) == 1 else range(int(parts[0]), int(parts[1]) + 1)
    if not 1 <= len(seeds) <= _MAX_SEEDS:
        raise UsageError(f"--seeds {text}: these are {len(seeds):,}; give at least 1 and at most {_MAX_SEEDS:,}.")
    return seeds


def parse_task_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Tasks by their numbers, such as 1,5,10, from the words of an option; None where it was not given."""
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text}: give tasks by their numbers, such as 1,5,10.") from None


if TYPE_CHECKING:
    from steppe.experiments.config import RunConfig


def build_config(options: argparse.Namespace, method: str, seed: int) -> RunConfig:
    """The configuration of one run."""
    from steppe.experiments.config import RunConfig
    from steppe.runtime.devices import resolve_device

    return RunConfig.make(
        options.benchmark,
        method,
        collect_overrides(options),
        seed=seed,
        device=resolve_device(options.device or "cpu"),
        threads=1 if options.threads is None else options.threads,
        plugins=options.plugin,
    )


def collect_overrides(options: argparse.Namespace) -> list[str]:
    """What --set, --epochs and --tasks change, all of it recorded in the same way."""
    shortened = [("training.epochs", options.epochs), ("benchmark.tasks", options.tasks)]
    return [*options.set, *(f"{key}={value}" for key, value in shortened if value is not None)]


def unused_path(path: Path) -> Path:
    """The path itself, or with a number behind it where it is taken."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


@contextmanager
def resume_hint(options: argparse.Namespace, out: Path) -> Iterator[None]:
    """Whoever stops what is done here is told the command that goes on with it, if there is something by then."""
    from steppe.results.layout import CONFIG, PLAN

    try:
        yield
    except KeyboardInterrupt:
        if any((out / name).exists() for name in (CONFIG, PLAN)):
            options.goes_on = f"steppe resume {shlex.quote(str(out))} goes on with it"
        raise


def load_finished_runs(directories: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """The results of all finished runs in these directories, each once, by their own; runs that are unfinished, or have
    a damaged result, are named.
    """
    from steppe.experiments.run_directory import read_results

    found: dict[Path, tuple[Path, dict[str, Any]]] = {}
    for directory in directories:
        results, unfinished, damaged = read_results(directory)
        for path, result in results.items():
            found.setdefault(path.resolve(), (path, result))
        report_skipped(unfinished, damaged)
    return dict(found.values())


def report_skipped(unfinished: Iterable[Path], damaged: Mapping[Path, Exception]) -> None:
    """Say which runs are left out, and why."""
    for path in unfinished:
        say(f"steppe: {path} is unfinished and left out.", file=sys.stderr)
    for error in damaged.values():
        say(f"steppe: {error} The run is left out.", file=sys.stderr)
