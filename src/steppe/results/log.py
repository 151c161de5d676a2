"""A run's log as it is read again: log.jsonl, a record a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steppe.results.layout import LOG
from steppe.runtime.files import parse_json, read_bounded

_LARGEST = 100_000_000  # bytes
_LONGEST = 1_000_000  # bytes of a record: that of a thousandth task has 20,000, and some for each layer


def events(run: Path) -> Iterator[dict[str, Any]]:
    """The records of a run's log; what cannot be read is passed over, for the result stands without it."""
    try:
        lines = read_bounded(run / LOG, _LARGEST).split(b"\n")
    except (OSError, ValueError):
        return
    for line in lines:
        if len(line) > _LONGEST:
            continue
        try:
            event = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def final_diagnostics(run: Path, tasks: int) -> dict[str, Any]:
    """What the method told of itself after the last of so many tasks; nothing where the log does not say, as one that
    was cut short: the last record that is there would be another task's.
    """
    ended = [event for event in events(run) if event.get("event") == "TaskEnded" and event.get("task") == tasks - 1]
    told = ended[-1].get("method") if ended else None
    return told if isinstance(told, dict) else {}
