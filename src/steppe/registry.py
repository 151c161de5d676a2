"""Where methods and benchmarks announce themselves by name, with the paper's values as presets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from steppe.errors import UsageError, short_repr, unknown_name
from steppe.settings import Settings

S = TypeVar("S", bound=type[Settings])


@dataclass(frozen=True)
class MethodEntry:
    """A name on the command line: settings of one kind, what sets this member of the family apart, and presets."""

    name: str
    settings: type[Settings]
    summary: str
    variant: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def values(self, benchmark: str) -> dict[str, Any]:
        """The settings' values for a benchmark: its preset where there is one, then what makes the member."""
        return {**self.presets.get(benchmark, {}), **self.variant}


@dataclass(frozen=True)
class BenchmarkEntry:
    """A name on the command line and the settings class that makes the benchmark."""

    name: str
    settings: type[Settings]
    summary: str
    argument: str = ""
    """The setting that may be given behind the name and a colon, as in `folder:PATH`."""


Entry = MethodEntry | BenchmarkEntry
METHODS: dict[str, MethodEntry] = {}
BENCHMARKS: dict[str, BenchmarkEntry] = {}


def register_method(
    name: str,
    settings: type[Settings],
    summary: str,
    *,
    variant: Mapping[str, Any] | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    training: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Make a method known by name. `variant` holds what tells it from its family, whatever the benchmark; `presets`
    holds values per benchmark, and `training` what it changes in a benchmark's training.
    """
    entry = MethodEntry(name, settings, summary, variant or {}, presets or {}, training or {})
    for benchmark in ("", *entry.presets):  # a preset that could not be used is found out here, not in a run
        settings.from_mapping(entry.values(benchmark))
    _validate_name("method", entry, METHODS.get(name))
    METHODS[name] = entry


def register_benchmark(name: str, summary: str, *, argument: str = "") -> Callable[[S], S]:
    """Make a benchmark known by name; `argument` is the setting that may follow the name and a colon."""

    def register(settings: S) -> S:
        entry = BenchmarkEntry(name, settings, summary, argument)
        _validate_name("benchmark", entry, BENCHMARKS.get(name))
        if lacking := sorted(getattr(settings, "__abstractmethods__", ())):
            raise UsageError(f"the benchmark {name!r} lacks {', '.join(lacking)}: write it in {settings.__name__}.")
        BENCHMARKS[name] = entry
        return settings

    return register


def _validate_name(kind: str, new: Entry, there: Entry | None) -> None:
    """Refuse a name that is no name of a directory, or somebody else's: its published figures would stand beside other
    results. What is registered once more from the same place, as in a notebook, takes the place of what was there.
    """
    if not re.fullmatch(r"\w[\w.+-]*", new.name):
        raise UsageError(
            f"the {kind} {short_repr(new.name)} cannot be called so: use letters, digits and + - _ . in its name."
        )
    if there is None or there == new:
        return
    module, name = there.settings.__module__, there.settings.__qualname__
    if module.startswith("steppe.") or (module, name) != (new.settings.__module__, new.settings.__qualname__):
        raise UsageError(f"there is a {kind} {new.name!r} already ({module}.{name}): choose another name.")


def find_method(name: str) -> MethodEntry:
    """The method of that name, or an error that lists them."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def find_benchmark(name: str) -> BenchmarkEntry:
    """The benchmark of that name, or an error that lists them."""
    if name not in BENCHMARKS:
        raise unknown_name("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]
