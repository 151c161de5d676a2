"""Which results may be averaged: those with equal settings, which differ in the seed alone."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from steppe.results.schema import RunResult

METHOD_SECTIONS = ("method", "training")
ALL_SECTIONS = ("benchmark", "training", "method")
"""Sections of the configuration that a run's numbers depend on."""


def group_by_settings(name: str, results: Sequence[RunResult], sections: Sequence[str]) -> dict[str, list[int]]:
    """Group results with equal settings.

    Args:
        name: What all results have in common, such as the method's name.
        results: The results.
        sections: The sections of the configuration to compare.

    Returns:
        The indices of the results in each group, by a label that says what sets the group apart, such as
        `er (buffer=500)`; just the name if nothing does.
    """
    settings = comparable_settings(results, sections)
    differing = differing_settings(results, sections)
    groups: dict[str, list[int]] = {}
    for index, values in enumerate(settings):
        apart = [f"{key.split('.', 1)[1]}={format_setting(values[key])}" for key in differing if key in values]
        groups.setdefault(f"{name} ({', '.join(apart)})" if apart else name, []).append(index)
    return groups


def differing_settings(results: Sequence[RunResult], sections: Sequence[str]) -> dict[str, list[Any]]:
    """The settings in which results differ.

    Args:
        results: The results.
        sections: The sections of the configuration to compare.

    Returns:
        The different values of each setting in order of appearance, by dotted key.
    """
    settings = comparable_settings(results, sections)
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for values in settings for key in values):
        by_text: dict[str, Any] = {}
        for values in settings:
            by_text.setdefault(format_setting(values.get(key)), values.get(key))
        if len(by_text) > 1:
            found[key] = list(by_text.values())
    return found


def comparable_settings(results: Sequence[RunResult], sections: Sequence[str]) -> list[dict[str, Any]]:
    """The settings of each result, completed so that results of several versions can be compared.

    A result from before a setting existed gets the default of the other results, if there is one.

    Args:
        results: The results.
        sections: The sections of the configuration to compare.

    Returns:
        The values of each result, by dotted key.
    """
    settings = [flat_settings(result.config, sections) for result in results]
    for result, values in zip(results, settings, strict=True):
        values["run.report"] = "validation" if result.on_validation else "test"  # never averaged together
    defaults: dict[str, Any] = {}
    for result, values in zip(results, settings, strict=True):
        explicit = explicit_settings(result, sections)
        for key, value in values.items():
            if key not in explicit:
                defaults.setdefault(key, value)
    return [{**defaults, **values} for values in settings]


def flat_settings(config: Mapping[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """Settings by dotted key, such as `method.lr`."""
    return {f"{section}.{key}": value for section in sections for key, value in config[section].items()}


def format_setting(value: Any) -> str:
    """A setting as a configuration file writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def explicit_settings(result: RunResult, sections: Collection[str]) -> dict[str, str]:
    """The settings that a result's command passes with `--set`.

    The command counts, not today's preset, which may have changed since the run.

    Args:
        result: The result.
        sections: The sections of the configuration to include.

    Returns:
        The values as text, by dotted key; empty if the command cannot be parsed.
    """
    try:
        words = shlex.split(result.command)
    except ValueError:
        return {}
    pairs = [value.partition("=") for option, value in pairwise(words) if option == "--set"]
    return {key: value for key, _, value in pairs if key.split(".", 1)[0] in sections and "." in key}
