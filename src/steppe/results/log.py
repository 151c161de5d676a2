"""Reading a run's log, log.jsonl: one JSON record per line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steppe.results.file_names import LOG
from steppe.runtime.environment import printable
from steppe.runtime.files import parse_json, read_bounded

_MAX_FILE_BYTES = 100_000_000
_MAX_RECORD_BYTES = 1_000_000  # the record of a thousandth task takes 20,000, plus a few per layer


@dataclass(frozen=True)
class TaskLog:
    """What a log says about each task, by the task's index.

    Attributes:
        names: Name of each finished task.
        diagnostics: What the method recorded about itself after each task: ranks, importances.
        remarks: Remarks on the tasks, in order.
    """

    names: dict[int, str] = field(default_factory=dict)
    diagnostics: dict[int, dict[str, Any]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def read_task_log(run: Path) -> TaskLog:
    """Read what a run's log says about each task; unreadable records are skipped.

    Args:
        run: The run directory.

    Returns:
        The content; empty if there is no log.
    """
    log = TaskLog()
    for event in read_events(run):
        task, diagnostics, remarks = event.get("task"), event.get("method"), event.get("remarks")
        if event.get("event") != "TaskEnded" or not isinstance(task, int):
            continue
        log.names[task] = printable(str(event.get("name", "")))
        if isinstance(diagnostics, dict):
            log.diagnostics[task] = diagnostics
        if isinstance(remarks, list):
            texts = [printable(remark) for remark in remarks if isinstance(remark, str)]
            log.remarks.extend(text for text in texts if text)
    return log


def read_accuracies(run: Path) -> dict[int, list[float]]:
    """Read the accuracies after each task from a run's log; unreadable records are skipped.

    Args:
        run: The run directory.

    Returns:
        The accuracy on every task so far, by the index of the task that had just been learned.
    """
    rows = {}
    for event in read_events(run):
        task, row = event.get("task"), event.get("accuracy")
        if event.get("event") != "TaskEnded" or type(task) is not int or not isinstance(row, list):
            continue
        if len(row) == task + 1 and all(isinstance(value, (int, float)) for value in row):
            rows[task] = [float(value) for value in row]
    return rows


def read_events(run: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a run's log. Unreadable ones are skipped, as the result does not depend on them.

    Args:
        run: The run directory.

    Yields:
        A record.
    """
    try:
        lines = read_bounded(run / LOG, _MAX_FILE_BYTES).split(b"\n")
    except (OSError, ValueError):
        return
    for line in lines:
        if len(line) > _MAX_RECORD_BYTES:
            continue
        try:
            event = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event
