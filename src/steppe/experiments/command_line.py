"""Runs as words of a command line: parsing of names and `--set`, formatting of commands to rerun."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import steppe.benchmarks  # noqa: F401 - registers its classes
import steppe.methods  # noqa: F401 - registers its classes
from steppe.errors import UsageError, unknown_name
from steppe.registry import find_benchmark
from steppe.settings import Limits, Settings


def split_benchmark_name(name: str) -> tuple[str, dict[str, Any]]:
    """Split a benchmark's name from the argument after the colon, as in `folder:PATH`.

    Args:
        name: The name as typed.

    Returns:
        The name without the argument, and the argument as a setting of the benchmark; empty if there is none.

    Raises:
        UsageError: The benchmark is unknown or takes no argument.

    Example:
        >>> split_benchmark_name("folder:photos")
        ('folder', {'path': 'photos'})
    """
    benchmark, colon, argument = name.partition(":")
    if not colon:
        return name, {}
    entry = find_benchmark(benchmark)
    if not entry.argument:
        raise UsageError(f"{name}: benchmark {benchmark} takes no argument; drop the colon and what follows it.")
    return benchmark, {entry.argument: argument}


def parse_override(override: str, settings: Mapping[str, type[Settings]]) -> tuple[str, str, str]:
    """Parse `section.key=value`, or `key=value` if only one section has the key.

    Args:
        override: The argument of `--set`.
        settings: The settings class of each section.

    Returns:
        Section, key and value.

    Raises:
        UsageError: The section or key is unknown, or several sections have the key.
    """  # noqa: DOC501
    name, equals, value = override.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"--set {override}: expected KEY=VALUE, for example --set method.lr=0.02.")
    name = name.strip()
    section, dot, key = name.partition(".")
    if dot:
        if section not in settings:
            raise unknown_name("section in --set", section, settings)
        if key not in settings[section].schema():
            raise unknown_name(f"setting of the {section}", key, settings[section].schema())
    else:
        sections = [section for section, kind in settings.items() if name in kind.schema()]
        if not sections:
            every = [f"{section}.{key}" for section, kind in settings.items() for key in kind.schema()]
            raise unknown_name("setting", name, every)
        if len(sections) > 1:
            options = " or ".join(f"{section}.{name}" for section in sections)
            raise UsageError(f"--set {override}: {name} is ambiguous; use {options}.")
        section, key = sections[0], name
    return section, key, _strip_value(value, *settings[section].schema()[key])


def _strip_value(value: str, kind: type, limits: Limits) -> str:
    """Remove surrounding blanks, except from free text, where they may be meant."""
    return value if kind is str and not limits.choices else value.strip()


def format_command(
    words: Sequence[str],
    *,
    device: str = "cpu",
    threads: int = 1,
    plugins: Iterable[str] = (),
    report: str = "test",
    overrides: Iterable[str] = (),
) -> str:
    """Format a steppe command as a user would type it; defaults are left out, and plugins appear by file name.

    Args:
        words: The command and its positional arguments.
        device: For `--device`.
        threads: For `--threads`.
        plugins: Paths for `--plugin`.
        report: For `--report`.
        overrides: `KEY=VALUE` pairs for `--set`.

    Returns:
        The command line, quoted for a shell.

    Example:
        >>> format_command(["run", "pmnist", "er"], threads=2, overrides=["method.lr=0.1"])
        'steppe run pmnist er --threads 2 --set method.lr=0.1'
    """
    line = ["steppe", *words]
    if device != "cpu":
        line += ["--device", device]
    if threads != 1:
        line += ["--threads", str(threads)]
    if report != "test":
        line += ["--report", report]
    for plugin in plugins:
        line += ["--plugin", Path(plugin).name]
    for override in overrides:
        line += ["--set", override]
    return shlex.join(line)
