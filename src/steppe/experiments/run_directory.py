"""The run directory: config.toml, log.jsonl, checkpoints, result.json, report.md.

In `checkpoints` lie the weights after each task and, while the run goes on, the last two states it can be resumed from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout
from torch import Tensor, nn

from steppe.checkpoint.io import read_state, write_state
from steppe.checkpoint.tree import State
from steppe.errors import RunError, UsageError, one_line
from steppe.experiments.config import RunConfig
from steppe.results.layout import BESIDE, CHECKPOINTS, CONFIG, LOG, PAGE, PLAN, REPORT, RESULT, TABLES
from steppe.results.schema import validate_result
from steppe.runtime.files import explain_write_errors, open_append, read_json, require_inside, write_atomic

_LOCK = ".lock"
_STATES = 2  # how many are kept: the last, and the one before in case the last is damaged


class RunDirectory:
    """A directory that one run fills; made only when the run is ready to start."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Write the configuration into a directory, which is made if it is not there."""
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            write_atomic(require_inside(path, path / CONFIG), config.as_toml().encode())
            require_inside(path, path / CHECKPOINTS).mkdir(exist_ok=True)
        return cls(path)

    def log(self, record: dict[str, Any]) -> None:
        """Append one record to the log."""
        with self._log() as file:
            file.write((json.dumps(record) + "\n").encode())

    def save_weights(self, model: nn.Module, task: int) -> None:
        """Keep the model as it is after a task."""
        write_state(require_inside(self.path, _weights_file(self.path, task)), "weights", dict(model.state_dict()))

    def drop_weights(self, task: int) -> None:
        """Let go of the model as it was after this task and later ones."""
        with explain_write_errors(self.path):
            for place in kept_weights(self.path):
                if place >= task:
                    self._remove(_weights_file(self.path, place))

    def save_state(self, state: State, *, alone: bool = False) -> None:
        """Keep what the run can be resumed from, with the length of the log, and drop the state before the last, or all
        that there are.
        """
        numbers = self.states
        with self._log() as file:
            os.fsync(file.fileno())
            length = file.tell()
        place = require_inside(self.path, self._state_file(numbers[-1] + 1 if numbers else 1))
        write_state(place, "run", {**state, "log": length})
        for number in numbers if alone else numbers[: -(_STATES - 1)]:
            with explain_write_errors(self.path):
                self._remove(self._state_file(number))

    def last_state(
        self, configs: Sequence[RunConfig], device: str, fits: Callable[[State], bool] = lambda state: True
    ) -> tuple[State, list[str]]:
        """The last state that is whole and fits, or None, and what is to be said about those that are not whole. One of
        another run than these is refused.
        """
        remarks: list[str] = []
        found: State = None
        for number in reversed(self.states):
            try:
                found = read_state(self._state_file(number), "run", device)
            except RunError as error:
                remarks.append(f"{error} What was there before it serves instead.")
                with explain_write_errors(self.path):
                    self._remove(self._state_file(number))
                continue
            if not isinstance(found, dict) or not any(config.describes(found.get("config")) for config in configs):
                raise RunError(f"{self._state_file(number)} belongs to a run with other settings: remove it.")
            if type(found.get("log")) is not int or found["log"] < 0:
                raise RunError(f"{self._state_file(number)} does not say how long the log was: remove it.")
            if fits(found):
                break
            found = None
        return found, remarks

    def cut_log(self, state: State) -> None:
        """Take out of the log what it tells of later than the state."""
        with self._log() as file:
            file.truncate(min(file.tell(), state["log"]) if state is not None else 0)

    @contextmanager
    def _log(self) -> Iterator[BinaryIO]:
        """The log, to be added to."""
        file = require_inside(self.path, self.path / LOG)
        with explain_write_errors(file), os.fdopen(open_append(file), "ab") as log:
            yield log

    def _remove(self, file: Path) -> None:
        require_inside(self.path, file.parent)  # a link itself may go, a file behind `checkpoints` may not
        file.unlink()

    def _state_file(self, number: int) -> Path:
        return self.path / CHECKPOINTS / f"state-{number:06d}.safetensors"

    def finish(self, result: dict[str, Any], report: str) -> None:
        """Write the result, which appears whole or not at all, and the report; states serve no more."""
        with explain_write_errors(self.path / RESULT):
            write_atomic(require_inside(self.path, self.path / RESULT), (json.dumps(result, indent=1) + "\n").encode())
        self.tidy(report)

    def tidy(self, report: str) -> None:
        """What comes after the result."""
        with explain_write_errors(self.path):
            write_atomic(require_inside(self.path, self.path / REPORT), report.encode())
            for number in self.states:
                self._remove(self._state_file(number))

    @property
    def states(self) -> list[int]:
        """Which states are there to be resumed from, in order."""
        return _numbered(self.path, "state-")


def _weights_file(path: Path, task: int) -> Path:
    return path / CHECKPOINTS / f"task-{task + 1:03d}.safetensors"


def kept_weights(path: Path) -> list[int]:
    """The places of the tasks after which a run directory holds weights, in order."""
    return _numbered(path, "task-", first=1)


def task_weights(path: Path, task: int) -> dict[str, Tensor]:
    """The model's weights and buffers after the task at this place, by name."""
    file = _weights_file(path, task)
    if not file.exists():
        raise UsageError(f"{file} is not there: the weights after task {task + 1} are not kept in this run directory.")
    weights = read_state(file, "weights")
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise RunError(f"{file} holds something else than weights.")
    return weights


def _numbered(path: Path, prefix: str, first: int = 0) -> list[int]:
    """The numbers in the names of the checkpoints that begin like this, less the number of the first."""
    numbers = [file.stem.removeprefix(prefix) for file in (path / CHECKPOINTS).glob(f"{prefix}*.safetensors")]
    return sorted(int(number) - first for number in numbers if number.isascii() and number.isdigit())


@contextmanager
def locked(path: Path, remedy: str = "wait for it, or choose another --out") -> Iterator[None]:
    """The directory is ours inside; where another process is at work in it, it is refused. It is made if it is not
    there, and taken away again if nothing came of it.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: choose another --out.")
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    with explain_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        _refuse_links(path)
        lock = FileLock(path / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"another process is at work in {path}: {remedy}.") from None
    try:
        for draft in [*path.glob(".*.part"), *path.glob(f"{CHECKPOINTS}/.*.part")]:  # a write that was killed
            if not draft.is_dir() or draft.is_symlink():
                draft.unlink(missing_ok=True)
        yield
    finally:
        if made and [file.name for file in path.iterdir()] == [_LOCK]:
            shutil.rmtree(path, ignore_errors=True)
            for folder in made[1:]:
                with suppress(OSError):  # somebody else put something there
                    folder.rmdir()
        lock.release()  # the file stays: taken away, two processes could hold locks on two files of its name


def _refuse_links(path: Path) -> None:
    """Refuse a directory in which a file of ours leads elsewhere, or is no file: now, not when everything is done."""
    names = (_LOCK, CONFIG, LOG, RESULT, CHECKPOINTS, REPORT, PAGE, PLAN, *TABLES, *BESIDE)
    for file in [*(path / name for name in names), *(path / CHECKPOINTS).glob("*.safetensors")]:
        require_inside(path, file)


def require_free(path: Path, *, for_study: bool = False) -> None:
    """Refuse a directory that already holds a run or a study, or a file that a new one would write over."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: choose another --out.")
    for kind, names in (("run", (CONFIG, RESULT)), ("study", (PLAN,))):
        for name in names:
            if (path / name).exists():
                raise UsageError(
                    f"{path} already holds a {kind} ({name}): go on with it by --resume, choose another --out, or "
                    "remove it."
                )
    for name in (*TABLES, PAGE) if for_study else (LOG, REPORT, PAGE, CHECKPOINTS):
        if (path / name).exists():
            raise UsageError(f"{path / name} is there, and would be written over: choose another --out, or move it.")


def runs_within(directory: Path) -> tuple[list[Path], list[Path]]:
    """The directories of finished and of unfinished runs in this one, itself included; without a finished one it is
    refused.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory: give a run's or a study's.")
    finished = sorted(file.parent for file in directory.rglob(RESULT))
    unfinished = sorted({config.parent for config in directory.rglob(CONFIG)} - set(finished))
    if not finished:
        state = f"{len(unfinished)} unfinished run(s) and no finished one" if unfinished else "no run"
        raise UsageError(f"{directory} holds {state}: there is nothing to show.")
    return finished, unfinished


def results_within(directory: Path) -> tuple[dict[Path, dict[str, Any]], list[Path], dict[Path, RunError]]:
    """The results in this directory, by their runs' own; the directories of unfinished runs; and what is wrong with
    results that cannot be read, which do not stand in the way of others. Where there are no others it is raised.
    """
    finished, unfinished = runs_within(directory)
    results: dict[Path, dict[str, Any]] = {}
    damaged: dict[Path, RunError] = {}
    for path in finished:
        try:
            results[path] = read_result(path)
        except RunError as error:
            damaged[path] = error
    if not results:
        raise next(iter(damaged.values()))
    return results, unfinished, damaged


def read_result(path: Path) -> dict[str, Any]:
    """The result of a finished run."""
    file = path / RESULT
    if not file.exists():
        state = "an unfinished run" if (path / CONFIG).exists() else "no run"
        raise UsageError(f"{path} holds {state}: there is no {RESULT} in it.")
    try:
        return validate_result(read_json(file))
    except (OSError, ValueError, RecursionError) as error:
        again = f", and steppe resume {path} does the run again" if (path / CONFIG).exists() else ""
        raise RunError(f"{file} cannot be read as a result: {one_line(error)}: remove it{again}.") from error
