"""Options and argument types that several commands share."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.errors import UsageError
from steppe.runtime.files import expand_path

if TYPE_CHECKING:
    from steppe.experiments.config import RunConfig

_MAX_SEEDS = 10_000
_MAX_DIGITS = 18  # a seed has 63 bits
OWN_PLUGIN = "Python file that registers your own methods or benchmarks; may be repeated"
PLUGIN_OF_RUN = (
    "plugin that the run was started with; plugins are code and run only if you name them (the file may have been "
    "moved, but not renamed)"
)
TRACKER_NAMES = ("tensorboard", "mlflow", "wandb")
SEEDS = "N means seeds 0 to N-1, A-B means seeds A to B"


def parse_path(text: str) -> Path:
    """Parse a path, expanding ~ even where the shell does not, as in --out=~/x.

    Args:
        text: The option's argument.

    Returns:
        The path.

    Raises:
        ArgumentTypeError: The path is invalid, or empty (as from an unset shell variable), which would mean the
            current directory.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty; use . for the current directory")
    try:
        return expand_path(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def _parse_file(text: str) -> str:
    return str(parse_path(text))


def add_plugin_option(parser: argparse.ArgumentParser, text: str = OWN_PLUGIN) -> None:
    """Add `--plugin FILE`."""
    parser.add_argument("--plugin", action="append", type=_parse_file, default=[], metavar="FILE", help=text)


def add_trust_option(parser: argparse.ArgumentParser, where: str) -> None:
    """Add `--trust-plugins`; `where` says where the plugins are named."""
    parser.add_argument("--trust-plugins", action="store_true", help=f"run all plugins named in {where}")


def add_data_option(parser: argparse.ArgumentParser, *, inner: bool = False) -> None:
    """Add `--data DIR`; for an inner command, its default does not overwrite the outer one's value."""
    parser.add_argument(
        "--data",
        type=parse_path,
        metavar="DIR",
        default=argparse.SUPPRESS if inner else None,
        help="data directory (default: $STEPPE_DATA, else the user's cache directory)",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` and `study` share."""
    add_jobs_option(parser)
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs per task (default: the benchmark's)")
    parser.add_argument("--tasks", type=int, metavar="N", help="use only the first N tasks")
    parser.add_argument(
        "--skip-tasks", type=int, default=0, metavar="N", help="leave out the first N tasks (see steppe search)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), help="where to train (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads per run (default: 1)")
    parser.add_argument(
        "--report",
        choices=("test", "validation"),
        default="test",
        help="measure accuracy on test data, or on training samples that the tasks do not use: for choosing settings "
        "(default: test)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting; if KEY is ambiguous, use benchmark.KEY, method.KEY or training.KEY; may be repeated",
    )
    parser.add_argument("--resume", action="store_true", help="resume what is in --out; if there is nothing, start")
    add_checkpoint_option(parser)
    parser.add_argument(
        "--log",
        action="append",
        choices=TRACKER_NAMES,
        default=[],
        help="also log losses, accuracies and ranks to this tracker; may be repeated",
    )
    add_data_option(parser)
    add_plugin_option(parser)


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    """Add `--jobs J`."""
    parser.add_argument("--jobs", type=int, metavar="J", help="parallel runs (default: one per core; 1 on a GPU)")


def validate_jobs(jobs: int | None) -> None:
    """Raise a UsageError if `--jobs` is less than 1."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {jobs}.")


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    """Add `--checkpoint-every MINUTES`."""
    parser.add_argument(
        "--checkpoint-every",
        type=_parse_minutes,
        default=5.0,
        metavar="MINUTES",
        help="minutes between checkpoints, which is what a killed run may lose (default: 5); Ctrl-C loses nothing",
    )


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of minutes, 0 or more, got {text!r}")
    return minutes


def parse_seeds(text: str) -> range:
    """Parse `--seeds`: 5 means 0 to 4, 5-9 means 5 to 9.

    Args:
        text: The option's argument.

    Returns:
        The seeds.

    Raises:
        UsageError: It is invalid, or has no seeds or too many.

    Example:
        >>> parse_seeds("5"), parse_seeds("5-9")
        (range(0, 5), range(5, 10))
    """
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isdecimal() and len(part) <= _MAX_DIGITS for part in parts):
        raise UsageError(f"--seeds must be a number, such as 5, or a range, such as 5-9; got {text}.")
    seeds = range(int(parts[0])) if len(parts) == 1 else range(int(parts[0]), int(parts[1]) + 1)
    if not 1 <= len(seeds) <= _MAX_SEEDS:
        raise UsageError(f"--seeds must give between 1 and {_MAX_SEEDS:,} seeds; {text} gives {len(seeds):,}.")
    return seeds


def parse_task_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parse task numbers such as 1,5,10.

    Args:
        option: The option's name, for the error message.
        text: Its argument; None if the option was not given.

    Returns:
        The numbers; None if the option was not given.

    Raises:
        UsageError: The text is not a list of numbers.
    """
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(f"{option} must be task numbers, such as 1,5,10; got {text}.") from None


def build_config(options: argparse.Namespace, method: str, seed: int) -> RunConfig:
    """Build the configuration of one run from the training options."""
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
        report=options.report,
        skip_tasks=options.skip_tasks,
    )


def collect_overrides(options: argparse.Namespace) -> list[str]:
    """Return the changes made by --set, --epochs and --tasks, all in the form of --set."""
    shortcuts = [("training.epochs", options.epochs), ("benchmark.tasks", options.tasks)]
    return [*options.set, *(f"{key}={value}" for key, value in shortcuts if value is not None)]


def unused_path(path: Path) -> Path:
    """Return the path, with a number appended if it exists."""
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


@contextmanager
def hint_at_resume(options: argparse.Namespace, out: Path) -> Iterator[None]:
    """If the user interrupts the work inside, and it left something to resume, tell them how."""
    from steppe.results.file_names import CONFIG, PLAN, SEARCH

    try:
        yield
    except KeyboardInterrupt:
        if any((out / name).exists() for name in (CONFIG, PLAN, SEARCH)):
            options.resume_hint = f"resume with: steppe resume {shlex.quote(str(out))}"
        raise
