"""The run directory: config.toml, log.jsonl, checkpoints, result.json, report.md.

`checkpoints` contains the weights after each task and, until the run is finished, the last two states to resume from.
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
from steppe.results.file_names import (
    BESIDE,
    CHECKPOINTS,
    CONFIG,
    LOG,
    PAGE,
    PLAN,
    REPORT,
    RESULT,
    SEARCH,
    TABLES,
    TENSORBOARD,
    TRACKERS,
)
from steppe.results.schema import RunResult
from steppe.runtime.files import explain_write_errors, open_append, read_json, require_inside, write_atomic

_LOCK = ".lock"
_STATES = 2  # number kept: the last, and the one before in case the last is damaged


class RunDirectory:
    """The directory of one run; created only when the run is ready to start."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Create the directory if it does not exist, and write the configuration."""
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            write_atomic(require_inside(path, path / CONFIG), config.as_toml().encode())
            require_inside(path, path / CHECKPOINTS).mkdir(exist_ok=True)
        return cls(path)

    def log(self, record: dict[str, Any]) -> None:
        """Append a record to the log."""
        with self._log() as file:
            file.write((json.dumps(record) + "\n").encode())

    def save_weights(self, model: nn.Module, task: int) -> None:
        """Save the model's weights after a task."""
        write_state(require_inside(self.path, _weights_file(self.path, task)), "weights", dict(model.state_dict()))

    def drop_weights(self, task: int) -> None:
        """Remove the weights saved after this task and later ones."""
        with explain_write_errors(self.path):
            for place in weight_checkpoints(self.path):
                if place >= task:
                    self._remove(_weights_file(self.path, place))

    def save_state(self, state: State, *, alone: bool = False) -> None:
        """Save a state to resume from, with the length of the log, and remove all but the state before it.

        Args:
            state: The state.
            alone: Remove all other states.
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
        """Read the last intact state.

        Args:
            configs: The configurations that the state may belong to.
            device: Where to load tensors.
            fits: Which states to accept.

        Returns:
            The state, or None, and remarks about damaged states, which are removed.

        Raises:
            RunError: A state belongs to a run with different settings.
        """
        remarks: list[str] = []
        state: State = None
        for number in reversed(self.states):
            try:
                state = read_state(self._state_file(number), "run", device)
            except RunError as error:
                remarks.append(f"{error} Using the previous checkpoint instead.")
                with explain_write_errors(self.path):
                    self._remove(self._state_file(number))
                continue
            if not isinstance(state, dict) or not any(config.matches(state.get("config")) for config in configs):
                raise RunError(f"{self._state_file(number)} belongs to a run with different settings; remove it.")
            if type(state.get("log")) is not int or state["log"] < 0:
                raise RunError(f"{self._state_file(number)} has no valid log length; remove it.")
            if fits(state):
                break
            state = None
        return state, remarks

    def truncate_log(self, state: State) -> None:
        """Remove log records written after the state."""
        with self._log() as file:
            file.truncate(min(file.tell(), state["log"]) if state is not None else 0)

    @contextmanager
    def _log(self) -> Iterator[BinaryIO]:
        """Open the log for appending."""
        file = require_inside(self.path, self.path / LOG)
        with explain_write_errors(file), os.fdopen(open_append(file), "ab") as log:
            yield log

    def _remove(self, file: Path) -> None:
        require_inside(self.path, file.parent)  # a link may be removed, but nothing outside the directory
        file.unlink()

    def _state_file(self, number: int) -> Path:
        return self.path / CHECKPOINTS / f"state-{number:06d}.safetensors"

    def finish(self, result: RunResult, report: str) -> None:
        """Write the result, atomically, and the report, and remove the states."""
        with explain_write_errors(self.path / RESULT):
            write_atomic(
                require_inside(self.path, self.path / RESULT), (json.dumps(result.as_dict(), indent=1) + "\n").encode()
            )
        self.clean_up(report)

    def clean_up(self, report: str) -> None:
        """Write the report and remove the states."""
        with explain_write_errors(self.path):
            write_atomic(require_inside(self.path, self.path / REPORT), report.encode())
            for number in self.states:
                self._remove(self._state_file(number))

    def drop_checkpoints(self) -> None:
        """Remove all weights and states, of a run whose result is all that counts."""
        self.drop_weights(0)
        with explain_write_errors(self.path):
            for number in self.states:
                self._remove(self._state_file(number))

    @property
    def states(self) -> list[int]:
        """The numbers of the saved states, in order."""
        return _checkpoint_numbers(self.path, "state-")


def _weights_file(path: Path, task: int) -> Path:
    return path / CHECKPOINTS / f"task-{task + 1:03d}.safetensors"


def weight_checkpoints(path: Path) -> list[int]:
    """Return the indices of the tasks after which weights were saved, in order."""
    return _checkpoint_numbers(path, "task-", first=1)


def read_weights(path: Path, task: int) -> dict[str, Tensor]:
    """Read the weights and buffers saved after a task.

    Args:
        path: The run directory.
        task: The task's index.

    Returns:
        The tensors by name.

    Raises:
        UsageError: No weights were saved after this task.
        RunError: The file is damaged.
    """
    file = _weights_file(path, task)
    if not file.exists():
        raise UsageError(f"{file} does not exist: no weights were saved after task {task + 1} in this run.")
    weights = read_state(file, "weights")
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise RunError(f"{file} does not contain weights.")
    return weights


def _checkpoint_numbers(path: Path, prefix: str, first: int = 0) -> list[int]:
    """Return the numbers in the names of checkpoints with this prefix, counted from `first`."""
    numbers = [file.stem.removeprefix(prefix) for file in (path / CHECKPOINTS).glob(f"{prefix}*.safetensors")]
    return sorted(int(number) - first for number in numbers if number.isascii() and number.isdigit())


@contextmanager
def lock_directory(path: Path, remedy: str = "wait for it, or choose another --out") -> Iterator[None]:
    """Hold the directory's lock; create the directory if needed, and remove it again if it stays empty.

    Args:
        path: The directory of a run or study.
        remedy: What to do if it is locked, for the error message.

    Raises:
        UsageError: Another process holds the lock, or the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose another --out.")
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    with explain_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        _refuse_links(path)
        lock = FileLock(path / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"another process is using {path}; {remedy}.") from None
    try:
        for draft in [*path.glob(".*.part"), *path.glob(f"{CHECKPOINTS}/.*.part")]:  # an interrupted write
            if not draft.is_dir() or draft.is_symlink():
                draft.unlink(missing_ok=True)
        yield
    finally:
        if made and [file.name for file in path.iterdir()] == [_LOCK]:
            shutil.rmtree(path, ignore_errors=True)
            for folder in made[1:]:
                with suppress(OSError):  # another process put something there
                    folder.rmdir()
        lock.release()  # the file stays: if removed, two processes could lock different files of the same name


def _refuse_links(path: Path) -> None:
    """Raise an error now, not at the end, if a file to be written is a link out of the directory or not a file."""
    names = (_LOCK, CONFIG, LOG, RESULT, CHECKPOINTS, REPORT, PAGE, PLAN, TRACKERS, TENSORBOARD, *TABLES, *BESIDE)
    for file in [*(path / name for name in names), *(path / CHECKPOINTS).glob("*.safetensors")]:
        require_inside(path, file)


def require_free(path: Path, *, for_study: bool = False) -> None:
    """Check that a new run would not overwrite anything.

    Args:
        path: The directory, which need not exist.
        for_study: Check for the files of a study instead of those of a run.

    Raises:
        UsageError: The path is a file, or the directory contains a file that would be overwritten.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose another --out.")
    for kind, names in (("run", (CONFIG, RESULT)), ("study", (PLAN,)), ("search", (SEARCH,))):
        for name in names:
            if (path / name).exists():
                raise UsageError(
                    f"{path} already contains a {kind} ({name}); pass --resume, choose another --out, or remove it."
                )
    for name in (*TABLES, PAGE, TRACKERS) if for_study else (LOG, REPORT, PAGE, CHECKPOINTS, TRACKERS, TENSORBOARD):
        if (path / name).exists():
            raise UsageError(f"{path / name} would be overwritten; choose another --out, or move it.")


def find_runs(directory: Path) -> tuple[list[Path], list[Path]]:
    """Find the runs in a directory, which may itself be a run.

    Args:
        directory: The directory of a run, a study, or several studies.

    Returns:
        The directories of finished and of unfinished runs, both sorted.

    Raises:
        UsageError: The directory does not exist.
    """
    if not directory.is_dir():
        raise UsageError(f"'{directory}' is not a directory; pass a run or study directory.")
    finished = sorted(file.parent for file in directory.rglob(RESULT))
    return finished, sorted({config.parent for config in directory.rglob(CONFIG)} - set(finished))


def read_results(directory: Path) -> tuple[dict[Path, RunResult], list[Path], dict[Path, RunError]]:
    """Read all results in a directory.

    Args:
        directory: The directory of a run, a study, or several studies.

    Returns:
        The results by run directory, the directories of unfinished runs, and the errors of damaged results.

    Raises:
        UsageError: There are no finished runs.
        RunError: All results are damaged.
    """  # noqa: DOC501
    finished, unfinished = find_runs(directory)
    if not finished:
        unfinished_only = f"only unfinished runs ({len(unfinished)})" if unfinished else "no runs"
        raise UsageError(f"{directory} contains {unfinished_only}; there is nothing to show.")
    results: dict[Path, RunResult] = {}
    damaged: dict[Path, RunError] = {}
    for path in finished:
        try:
            results[path] = read_result(path)
        except RunError as error:
            damaged[path] = error
    if not results:
        raise next(iter(damaged.values()))
    return results, unfinished, damaged


def read_result(path: Path) -> RunResult:
    """Read and validate the result of a finished run.

    Args:
        path: The run directory.

    Returns:
        The result.

    Raises:
        UsageError: The run is not finished.
        RunError: The result is damaged.
    """
    file = path / RESULT
    if not file.exists():
        state = "an unfinished run" if (path / CONFIG).exists() else "no run"
        raise UsageError(f"{path} contains {state}: {RESULT} does not exist.")
    try:
        return RunResult.from_dict(read_json(file))
    except (OSError, ValueError, RecursionError) as error:
        rerun = f" and run steppe resume {path}" if (path / CONFIG).exists() else ""
        raise RunError(f"cannot read {file} as a result: {one_line(error)}; remove it{rerun}.") from error
