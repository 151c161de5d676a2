"""What the options of `run` and `study` add up to."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steppe.config import RunConfig


def config_of(options: argparse.Namespace, method: str, seed: int) -> RunConfig:
    """The configuration of one run."""
    from steppe.config import RunConfig
    from steppe.devices import resolved_device

    return RunConfig.make(
        options.benchmark,
        method,
        overrides(options),
        seed=seed,
        device=resolved_device(options.device or "cpu"),
        threads=1 if options.threads is None else options.threads,
        plugins=options.plugin,
    )


def overrides(options: argparse.Namespace) -> list[str]:
    """What --set, --epochs and --tasks change, all of it recorded in the same way."""
    shortened = [("training.epochs", options.epochs), ("benchmark.tasks", options.tasks)]
    return [*options.set, *(f"{key}={value}" for key, value in shortened if value is not None)]


def free(path: Path) -> Path:
    """The path itself, or with a number behind it where it is taken."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


@contextmanager
def resumable(options: argparse.Namespace, out: Path) -> Iterator[None]:
    """Whoever stops what is done here is told the command that goes on with it, if there is something by then."""
    from steppe.runs import CONFIG, PLAN

    try:
        yield
    except KeyboardInterrupt:
        if any((out / name).exists() for name in (CONFIG, PLAN)):
            options.goes_on = f"steppe resume {shlex.quote(str(out))} goes on with it"
        raise
