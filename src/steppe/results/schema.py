"""What a result.json must hold, so that tables and figures can be made of it: checked where one is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from steppe.errors import has_control_characters
from steppe.settings import TrainingConfig

_SECTIONS = ("run", "benchmark", "training", "method")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that can be counted with, in a result or in a log: finite, and no truth value."""
    return type(value) in (int, float) and -1e300 < value < 1e300  # type: ignore[operator]


def _number_or_none(value: object) -> bool:
    return value is None or is_number(value)


def _whole(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and not has_control_characters(value)


def _setting(value: object) -> bool:
    return value == "" or isinstance(value, bool) or is_number(value) or _text(value)


def _square(value: object) -> bool:
    """A row for each task, in which the tasks learnt by then are all measured or all left open."""
    if not isinstance(value, list):
        return False
    for place, row in enumerate(value):
        if not isinstance(row, list) or len(row) != len(value) or not all(map(_number_or_none, row)):
            return False
        if len({entry is None for entry in row[: place + 1]}) != 1:
            return False
    return True


def _all(kind: Callable[[object], bool], *needed: str) -> Callable[[object], bool]:
    """A dictionary with such values, some of which must be there."""
    return lambda value: isinstance(value, dict) and value.keys() >= set(needed) and all(map(kind, value.values()))


_FIELDS: dict[str, Callable[[object], bool]] = {
    "benchmark": _text,
    "method": _text,
    "seed": _whole,
    "acc": is_number,
    "bwt": _number_or_none,
    "learning_acc": _number_or_none,
    "forgetting": _number_or_none,
    "accuracy": _square,
    "updates": _whole,
    "seconds": _all(is_number, "train", "evaluate", "memory"),
    "bytes": _all(_whole),
    "full_length": lambda value: isinstance(value, bool),
    "command": _text,
    "versions": _all(_text),
    "config": _all(_all(lambda value: isinstance(value, list) or _setting(value)), *_SECTIONS),
}
_NEWER: dict[str, Callable[[object], bool]] = {  # not in results of older versions
    "schedule": _text,
    "forward_transfer": _number_or_none,
    "cpu_seconds": _all(is_number, "train", "evaluate", "memory"),
    "untrained": lambda value: isinstance(value, list) and all(map(is_number, value)),
    "ahead": lambda value: isinstance(value, list) and all(map(is_number, value)),
}


def validate_result(data: Any) -> dict[str, Any]:
    """The data, if it is a result; ValueError names what is missing or is not what it should be."""
    if not isinstance(data, dict) or not data.keys() >= _FIELDS.keys():
        raise ValueError("it lacks the fields of a result")
    for name, right in _FIELDS.items():
        if not right(data[name]):
            raise ValueError(f"its field {name!r} is not what a result has there")
    remarks = data.get("remarks", [])
    if not isinstance(remarks, list) or not all(map(_text, remarks)):
        raise ValueError("its field 'remarks' is not a list of texts")
    for name, right in _NEWER.items():
        if name in data and not right(data[name]):
            raise ValueError(f"its field {name!r} is not what a result has there")
    machine = data.get("machine", {})  # not in results of older versions
    if not _all(lambda value: is_number(value) or _text(value))(machine):
        raise ValueError("its field 'machine' is not what a result has there")
    config = data["config"]
    current = {**config, "training": TrainingConfig.rename_old_keys(config["training"])}
    return {**data, "config": current}
