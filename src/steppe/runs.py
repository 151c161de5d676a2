"""The run directory: config.toml, log.jsonl, a checkpoint of the weights after each task, result.json, report.md."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from steppe.config import RunConfig
from steppe.errors import RunError, UsageError, disk_refusal

CONFIG, LOG, RESULT, REPORT, CHECKPOINTS = "config.toml", "log.jsonl", "result.json", "report.md", "checkpoints"
_WEIGHTS = "task-{}.safetensors"

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
        """Make the directory and write the configuration; a directory that holds a run already is refused."""
        refuse_taken(path)
        made = not path.exists()
        directory = cls(path)
        try:
            with writing(path):
                (path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
                write_whole(path / CONFIG, config.as_toml().encode())
        except RunError:
            if made:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return directory

    def log(self, record: dict[str, Any]) -> None:
        """Append one record to the log."""
        with writing(self.path / LOG), (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def save_weights(self, model: nn.Module, task: int) -> None:
        """Keep the model as it is after a task."""
        path = _weights_file(self.path, task)
        # Copies: weights that share memory cannot be saved by one name each.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
        with writing(path):
            write_whole(path, save(tensors))

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result; it appears whole or not at all."""
        with writing(self.path / RESULT):
            write_whole(self.path / RESULT, (json.dumps(result, indent=1) + "\n").encode())

    def write_text(self, name: str, text: str) -> None:
        """Write a text file beside the result."""
        with writing(self.path / name):
            write_whole(self.path / name, text.encode())


def refuse_taken(path: Path) -> None:
    """Refuse a directory that already holds a run."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: choose another --out.")
    for name in (CONFIG, RESULT):
        if (path / name).exists():
            raise UsageError(f"{path} already holds a run ({name}): choose another --out, or remove it.")


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


def kept_weights(path: Path) -> list[int]:
    """The places of the tasks after which a run directory holds weights, in order."""
    found = (re.fullmatch(_WEIGHTS.format("([0-9]+)"), file.name) for file in (path / CHECKPOINTS).glob("*"))
    return sorted(int(match[1]) - 1 for match in found if match is not None)


def task_weights(path: Path, task: int) -> dict[str, Tensor]:
    """The model's tensors after the task at this place, by name."""
    file = _weights_file(path, task)
    if not file.exists():
        raise UsageError(f"{file} is not there: the weights after task {task + 1} are not kept in this run directory.")
    try:
        return load(file.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"{file} cannot be read as weights: {error}") from error


def _weights_file(path: Path, task: int) -> Path:
    return path / CHECKPOINTS / _WEIGHTS.format(f"{task + 1:03d}")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all: beside its place, flushed, then moved."""
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {disk_refusal(error)}: mend that, or choose another --out.") from error
