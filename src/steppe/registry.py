"""The registered methods and benchmarks, by name, with the paper's values as presets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from steppe.errors import UsageError, short_repr, unknown_name
from steppe.settings import SearchRange, Settings, without

S = TypeVar("S", bound=type[Settings])


@dataclass(frozen=True)
class MethodEntry:
    """A registered method.

    Attributes:
        name: The name on the command line.
        settings: The class of its settings.
        summary: One line for `steppe list`.
        variant: Settings that define this member of a family, on every benchmark.
        presets: Settings by benchmark.
        training: Changes to a benchmark's training configuration, by benchmark.
    """

    name: str
    settings: type[Settings]
    summary: str
    variant: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def values(self, benchmark: str) -> dict[str, Any]:
        """Return the settings for a benchmark: its preset, if any, then the variant."""
        return {**self.presets.get(benchmark, {}), **self.variant}

    def search_space(self, settings: Settings) -> dict[str, SearchRange]:
        """Return what a search varies around these settings; what defines this member of a family stays."""
        return without(settings.search_space(), *self.variant)


@dataclass(frozen=True)
class BenchmarkEntry:
    """A registered benchmark.

    Attributes:
        name: The name on the command line.
        settings: The benchmark's class.
        summary: One line for `steppe list`.
        argument: The setting that may follow the name after a colon, as in `folder:PATH`.
    """

    name: str
    settings: type[Settings]
    summary: str
    argument: str = ""


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
    """Register a method, so that the command line can find it by name.

    Args:
        name: The name: letters, digits and `+ - _ .`.
        settings: The class of its settings, a `steppe.MethodConfig`.
        summary: One line for `steppe list`.
        variant: Settings that define this member of a family, on every benchmark.
        presets: Settings by benchmark.
        training: Changes to a benchmark's training configuration, by benchmark.

    Raises:
        UsageError: The name is invalid or taken, or a preset is invalid.

    Example:
        >>> import steppe
        >>> steppe.register_method("er-large", steppe.ER, "Replay from a large buffer.", variant={"buffer": 5000})
    """
    entry = MethodEntry(name, settings, summary, variant or {}, presets or {}, training or {})
    for benchmark in ("", *entry.presets):  # report an invalid preset now, not in a run
        settings.from_mapping(entry.values(benchmark))
    _validate_name("method", entry, METHODS.get(name))
    METHODS[name] = entry


def register_benchmark(name: str, summary: str, *, argument: str = "") -> Callable[[S], S]:
    """Return a class decorator that registers a benchmark, so that the command line can find it by name.

    Args:
        name: The name: letters, digits and `+ - _ .`.
        summary: One line for `steppe list`.
        argument: The setting that may follow the name after a colon, as in `folder:PATH`.

    Raises:
        UsageError: The name is invalid or taken, or the class lacks a required method.
    """

    def register(settings: S) -> S:
        entry = BenchmarkEntry(name, settings, summary, argument)
        _validate_name("benchmark", entry, BENCHMARKS.get(name))
        if missing := sorted(getattr(settings, "__abstractmethods__", ())):
            raise UsageError(f"benchmark {name!r} lacks {', '.join(missing)}; implement it in {settings.__name__}.")
        BENCHMARKS[name] = entry
        return settings

    return register


def _validate_name(kind: str, new: Entry, existing: Entry | None) -> None:
    """Reject names that cannot be directory names, and names in use: tables would mix up published results.

    Registering a class again from the same module, as in a notebook, replaces the entry.

    Args:
        kind: "method" or "benchmark", for the error message.
        new: The entry to register.
        existing: The entry of this name, if there is one.

    Raises:
        UsageError: The name is invalid or in use.
    """
    if not re.fullmatch(r"\w[\w.+-]*", new.name):
        raise UsageError(
            f"invalid {kind} name {short_repr(new.name)}; use only letters, digits and + - _ . and start with a "
            "letter or digit."
        )
    if existing is None or existing == new:
        return
    module, name = existing.settings.__module__, existing.settings.__qualname__
    if module.startswith("steppe.") or (module, name) != (new.settings.__module__, new.settings.__qualname__):
        raise UsageError(f"the {kind} name {new.name!r} is already taken by {module}.{name}; choose another name.")


def find_method(name: str) -> MethodEntry:
    """Return the method with this name; an unknown name raises a UsageError that lists the known ones."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def find_benchmark(name: str) -> BenchmarkEntry:
    """Return the benchmark with this name; an unknown name raises a UsageError that lists the known ones."""
    if name not in BENCHMARKS:
        raise unknown_name("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]
