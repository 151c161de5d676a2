"""What results were made with: their settings by dotted key, and which of them have equal ones."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any


def group_by_settings(name: str, results: Sequence[Mapping[str, Any]], sections: Sequence[str]) -> dict[str, list[int]]:
    """The places of results with equal settings in these sections of the configuration, by a label that says what
    tells them apart, as in `er (buffer=500)`; the name alone where nothing does.

    A result written before a setting existed counts as having the value that others had without asking for it.
    """
    settings = [flat(result["config"], sections) for result in results]
    unasked: dict[str, Any] = {}
    for result, values in zip(results, settings, strict=True):
        asked = explicit_settings(result, sections)
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


def explicit_settings(result: Mapping[str, Any], sections: Collection[str]) -> dict[str, str]:
    """What a result's command sets beyond its preset, in these sections, by dotted key; its preset may have changed
    since.
    """
    try:
        words = shlex.split(result["command"])
    except ValueError:
        return {}
    pairs = [given.partition("=") for option, given in pairwise(words) if option == "--set"]
    return {key: value for key, _, value in pairs if key.split(".", 1)[0] in sections and "." in key}


_SEE_AGAIN = ("multitask", "oracle")  # what results of older versions do not say


def is_sequential(result: Mapping[str, Any]) -> bool:
    """Whether a run saw each task once, in its turn, as its result says: Multitask and Oracle see earlier ones whole
    again, and Oracle has a BWT all the same.
    """
    schedule = result.get("schedule", "joint" if result["method"] in _SEE_AGAIN else "sequential")
    return bool(schedule == "sequential")
