"""The run directory: config.toml, log.jsonl, checkpoints, result.json, report.md.

In `checkpoints` lie the weights after each task and, while the run goes on, the last two states it can be resumed from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor, nn

from steppe.config import RunConfig
from steppe.errors import RunError, UsageError
from steppe.files import write_whole, writing
from steppe.saving import read_state, write_state
from steppe.state import State

CONFIG, LOG, RESULT, REPORT, CHECKPOINTS = "config.toml", "log.jsonl", "result.json", "report.md", "checkpoints"
_LOCK = ".lock"
_STATES = 2  # how many are kept: the last, and the one before in case the last is damaged

_FIELDS = {
    *("benchmark", "method", "seed", "acc", "bwt", "learning_acc", "forgetting", "accuracy", "updates"),
    *("seconds", "bytes", "full_length", "command", "versions", "config"),
}


class RunDirectory:
    """A directory that one run fills; made only when the run is ready to start."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Write the configuration into a directory, which is made if it is not there."""
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            write_whole(path / CONFIG, config.as_toml().encode())
            (path / CHECKPOINTS).mkdir(exist_ok=True)
        return cls(path)

    def log(self, record: dict[str, Any]) -> None:
        """Append one record to the log."""
        with writing(self.path / LOG), (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def save_weights(self, model: nn.Module, task: int) -> None:
        """Keep the model as it is after a task."""
        write_state(_weights_file(self.path, task), "weights", dict(model.state_dict()))

    def save_state(self, state: State) -> None:
        """Keep what the run can be resumed from, with the length of the log, and drop the state before the last."""
        numbers = _state_numbers(self.path)
        with writing(self.path / LOG), (self.path / LOG).open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())
            length = file.tell()
        write_state(self._state_file(numbers[-1] + 1 if numbers else 1), "run", {**state, "log": length})
        for number in numbers[: -(_STATES - 1)]:
            with writing(self.path):
                self._state_file(number).unlink()

    def last_state(self, config: RunConfig, device: str) -> tuple[State, list[str]]:
        """The last state that is whole, or None, and what is to be said about those that are not. What the log tells
        of later is taken out of it.
        """
        remarks: list[str] = []
        found: State = None
        for number in reversed(_state_numbers(self.path)):
            try:
                found = read_state(self._state_file(number), "run", device)
            except RunError as error:
                remarks.append(f"{error} What was there before it serves instead.")
                with writing(self.path):
                    self._state_file(number).unlink()
                continue
            if found["config"] != config.as_dict():
                raise RunError(f"{self._state_file(number)} belongs to a run with other settings: remove it.")
            break
        with writing(self.path / LOG), (self.path / LOG).open("a", encoding="utf-8") as file:
            file.truncate(min(file.tell(), found["log"]) if found is not None else 0)
        return found, remarks

    def _state_file(self, number: int) -> Path:
        return self.path / CHECKPOINTS / f"state-{number:06d}.safetensors"

    def finish(self, result: dict[str, Any], report: str) -> None:
        """Write the result, which appears whole or not at all, and the report; states serve no more."""
        with writing(self.path / RESULT):
            write_whole(self.path / RESULT, (json.dumps(result, indent=1) + "\n").encode())
        self.tidy(report)

    def tidy(self, report: str) -> None:
        """What comes after the result."""
        with writing(self.path):
            write_whole(self.path / REPORT, report.encode())
            for number in _state_numbers(self.path):
                self._state_file(number).unlink()


def _weights_file(path: Path, task: int) -> Path:
    return path / CHECKPOINTS / f"task-{task + 1:03d}.safetensors"


def task_weights(path: Path, task: int) -> dict[str, Tensor]:
    """The model's weights and buffers after a task of a run, by name."""
    file = _weights_file(path, task)
    if not file.exists():
        raise UsageError(f"{file} is not there: the run did not get so far, or its weights were not kept.")
    weights = read_state(file, "weights")
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise RunError(f"{file} holds something else than weights.")
    return weights


def kept_weights(path: Path) -> list[int]:
    """The places of the tasks after which a run directory holds weights, in order."""
    numbers = [file.stem.removeprefix("task-") for file in (path / CHECKPOINTS).glob("task-*.safetensors")]
    return sorted(int(number) - 1 for number in numbers if number.isdigit())


def _state_numbers(path: Path) -> list[int]:
    """Which states are there, in order."""
    numbers = [file.stem.removeprefix("state-") for file in (path / CHECKPOINTS).glob("state-*.safetensors")]
    return sorted(int(number) for number in numbers if number.isdigit())


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The directory is ours inside; where another process is at work in it, it is refused. It is made if it is not
    there, and taken away again if nothing came of it.
    """
    made = not path.exists()
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"another process is at work in {path}: wait for it, or choose another --out.") from None
    try:
        for draft in [*path.glob(".*.part"), *path.glob(f"{CHECKPOINTS}/.*.part")]:  # a write that was killed
            draft.unlink(missing_ok=True)
        yield
    finally:
        if made and [file.name for file in path.iterdir()] == [_LOCK]:
            shutil.rmtree(path, ignore_errors=True)
        lock.release()  # the file stays: taken away, two processes could hold locks on two files of its name


def refuse_taken(path: Path) -> None:
    """Refuse a directory that already holds a run."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: choose another --out.")
    for name in (CONFIG, RESULT):
        if (path / name).exists():
            raise UsageError(
                f"{path} already holds a run ({name}): go on with it by --resume, choose another --out, or remove it."
            )


def read_result(path: Path) -> dict[str, Any]:
    """The result of a finished run."""
    file = path / RESULT
    if not file.exists():
        state = "an unfinished run" if (path / CONFIG).exists() else "no run"
        raise UsageError(f"{path} holds {state}: there is no {RESULT} in it.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not data.keys() >= _FIELDS:
            raise ValueError("it lacks the fields of a result")
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read as a result: {error}") from error
    return data
