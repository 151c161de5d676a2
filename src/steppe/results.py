"""What a result.json must hold, so that tables and figures can be made of it: checked where one is read."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from steppe.errors import has_controls

_SECTIONS = ("run", "benchmark", "training", "method")


def _number(value: object) -> bool:
    return type(value) in (int, float) and -1e300 < value < 1e300  # type: ignore[operator]


def _number_or_none(value: object) -> bool:
    return value is None or _number(value)


def _whole(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and not has_controls(value)


def _setting(value: object) -> bool:
    return value == "" or isinstance(value, bool) or _number(value) or _text(value)


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
    "acc": _number,
    "bwt": _number_or_none,
    "learning_acc": _number_or_none,
    "forgetting": _number_or_none,
    "accuracy": _square,
    "updates": _whole,
    "seconds": _all(_number, "train", "evaluate", "memory"),
    "bytes": _all(_whole),
    "full_length": lambda value: isinstance(value, bool),
    "command": _text,
    "versions": _all(_text),
    "config": _all(_all(lambda value: isinstance(value, list) or _setting(value)), *_SECTIONS),
}
_NEWER: dict[str, Callable[[object], bool]] = {  # not in results of older versions
    "forward_transfer": _number_or_none,
    "untrained": lambda value: isinstance(value, list) and all(map(_number, value)),
    "ahead": lambda value: isinstance(value, list) and all(map(_number, value)),
}


def checked_result(data: Any) -> dict[str, Any]:
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
    if not _all(lambda value: _number(value) or _text(value))(machine):
        raise ValueError("its field 'machine' is not what a result has there")
    return data


def with_equal_settings(
    name: str, results: Sequence[Mapping[str, Any]], sections: Sequence[str]
) -> dict[str, list[int]]:
    """The places of results with equal settings in these sections of the configuration, by a label that says what
    tells them apart, as in `er (buffer=500)`; the name alone where nothing does.

    A result written before a setting existed counts as having the value that others had without asking for it.
    """
    settings = [flat(result["config"], sections) for result in results]
    unasked: dict[str, Any] = {}
    for result, values in zip(results, settings, strict=True):
        asked = settings_given(result, sections)
        for key, value in values.items():
            if key not in asked:
                unasked.setdefault(key, value)
    whole = [{**unasked, **values} for values in settings]
    keys = dict.fromkeys(key for values in whole for key in values)
    differing = [key for key in keys if len({written(values.get(key)) for values in whole}) > 1]
    groups: dict[str, list[int]] = {}
    for place, values in enumerate(whole):
        apart = [f"{key.split('.', 1)[1]}={written(values[key])}" for key in differing if key in values]
        groups.setdefault(f"{name} ({', '.join(apart)})" if apart else name, []).append(place)
    return groups


def flat(config: Mapping[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """Settings by dotted key, as in `method.lr`."""
    return {f"{section}.{key}": value for section in sections for key, value in config[section].items()}


def written(value: Any) -> str:
    """A setting as it is written in a configuration."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_given(result: Mapping[str, Any], sections: Collection[str]) -> dict[str, str]:
    """What a result's command sets beyond its preset, in these sections, by dotted key; its preset may have changed
    since.
    """
    try:
        words = shlex.split(result["command"])
    except ValueError:
        return {}
    pairs = [given.partition("=") for option, given in pairwise(words) if option == "--set"]
    return {key: value for key, _, value in pairs if key.split(".", 1)[0] in sections and "." in key}
