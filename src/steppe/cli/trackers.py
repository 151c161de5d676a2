"""`--log`: trackers that follow runs, and continue where they were when a run is resumed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from steppe.cli.options import TRACKER_NAMES
from steppe.errors import RunError, SteppeError, one_line
from steppe.integrations.mlflow import MLflowLogger
from steppe.integrations.requirements import require
from steppe.integrations.tensorboard import TensorBoardLogger
from steppe.integrations.tracker import Tracker
from steppe.integrations.wandb import WandbLogger
from steppe.learning.events import EpochEnded, Progress, RunStarted, TaskEnded
from steppe.results.file_names import TENSORBOARD, TRACKERS
from steppe.results.log import read_accuracies
from steppe.runtime.files import explain_write_errors, read_json, require_inside, write_atomic

if TYPE_CHECKING:
    from steppe.experiments.config import RunConfig

Notes = dict[str, dict[str, Any]]
"""What to remember of each tracker of a run, by the tracker's name."""


def chosen_trackers(options: argparse.Namespace, out: Path, *, resume: bool) -> list[str]:
    """The trackers of a run or study: those given, or else those it was started with.

    Args:
        options: The parsed command line.
        out: The directory of the run or study.
        resume: Whether it may have been started before.

    Returns:
        Their names.

    Raises:
        UsageError: The library of one is not installed.
    """
    given = list(dict.fromkeys(getattr(options, "log", [])))
    names = given or (list(read_notes(out)) if resume else [])
    for name in names:
        require(f"--log {name}", name, name)
    return names


def read_notes(out: Path) -> Notes:
    """What is remembered in a directory; nothing if the file is missing or unreadable."""
    try:
        notes = read_json(out / TRACKERS)
        return {name: dict(notes[name]) for name in TRACKER_NAMES if name in notes}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def write_notes(out: Path, notes: Notes) -> None:
    """Remember the trackers in a directory."""
    with explain_write_errors(out / TRACKERS):
        write_atomic(require_inside(out, out / TRACKERS), (json.dumps(notes, indent=1) + "\n").encode())


class RunTrackers:
    """The trackers of one run; opened when it starts, which is when its directory exists.

    Args:
        names: The trackers' names.
        config: The run's configuration.
        out: Its directory.
    """

    def __init__(self, names: Sequence[str], config: RunConfig, out: Path) -> None:
        self._names, self._config, self._out = names, config, out
        self._open: dict[str, Tracker] = {}
        self._notes: Notes = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in self._open.values():
            tracker.close()

    def __call__(self, message: object) -> None:
        """Pass on an event of the run."""
        if not self._names or not isinstance(message, (RunStarted, Progress, EpochEnded, TaskEnded)):
            return
        if isinstance(message, RunStarted):
            self._start()
        for name, tracker in self._open.items():
            tracker(message)
            if isinstance(tracker, WandbLogger):  # which cannot be asked what it has
                self._notes[name]["points"] = tracker.points
                write_notes(self._out, self._notes)

    def _start(self) -> None:
        before = read_notes(self._out)
        for name in self._names:
            try:
                self._open[name] = _OPEN[name](self._config, self._out, before.get(name, {}))
            except SteppeError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {one_line(error)}"
                raise RunError(f"--log {name} cannot start ({reason}); resume the run once it works.") from error
        for task, row in read_accuracies(self._out).items():
            for tracker in self._open.values():
                tracker.restore_row(task, row)
        for name, tracker in self._open.items():
            run_id = getattr(tracker, "run_id", None)
            self._notes[name] = {} if run_id is None else {"run": run_id}
        write_notes(self._out, {**before, **self._notes})


def _run_name(config: RunConfig) -> str:
    return f"{config.benchmark}-{config.method}-seed{config.seed}"


def _rate(config: RunConfig) -> float | None:
    rate = getattr(config.method_settings, "lr", None)
    return float(rate) if isinstance(rate, (int, float)) else None


def _settings(config: RunConfig) -> dict[str, object]:
    """The configuration as flat names and values."""
    parts = config.as_dict()
    return {f"{part}.{key}": value for part, values in parts.items() for key, value in values.items()}


def _open_tensorboard(config: RunConfig, out: Path, note: dict[str, Any]) -> Tracker:
    return TensorBoardLogger(require_inside(out, out / TENSORBOARD), lr=_rate(config))


def _open_mlflow(config: RunConfig, out: Path, note: dict[str, Any]) -> Tracker:
    return MLflowLogger(note.get("run"), name=_run_name(config), lr=_rate(config), config=_settings(config))


def _open_wandb(config: RunConfig, out: Path, note: dict[str, Any]) -> Tracker:
    points = {str(name): (int(step), float(value)) for name, (step, value) in note.get("points", {}).items()}
    return WandbLogger(
        note.get("run"),
        name=_run_name(config),
        directory=out,
        lr=_rate(config),
        config=_settings(config),
        points=points,
    )


_OPEN: dict[str, Callable[[RunConfig, Path, dict[str, Any]], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "mlflow": _open_mlflow,
    "wandb": _open_wandb,
}
