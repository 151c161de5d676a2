"""The run directory: config.toml, log.jsonl, a checkpoint of the weights after each task, result.json, report.md."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from steppe.config import RunConfig
from steppe.errors import RunError, UsageError, disk_refusal

CONFIG, LOG, RESULT, REPORT, CHECKPOINTS = "config.toml", "log.jsonl", "result.json", "report.md", "checkpoints"


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
        path = self.path / CHECKPOINTS / f"task-{task + 1:03d}.safetensors"
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
