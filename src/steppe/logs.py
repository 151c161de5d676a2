"""A run's log as it is read again: log.jsonl, a record a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steppe.files import read_bounded
from steppe.runs import LOG


def events(run: Path) -> Iterator[dict[str, Any]]:
    """The records of a run's log; what cannot be read is passed over, for the result stands without it."""
    try:
        if not (run / LOG).is_file():  # one that has no end would never be read
            return
        lines = read_bounded(run / LOG).decode().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def told_at_the_end(run: Path, tasks: int) -> dict[str, Any]:
    """What the method told of itself after the last of so many tasks; nothing where the log does not say, as one that
    was cut short: the last record that is there would be another task's.
    """
    ended = [event for event in events(run) if event.get("event") == "TaskEnded" and event.get("task") == tasks - 1]
    told = ended[-1].get("method") if ended else None
    return told if isinstance(told, dict) else {}
