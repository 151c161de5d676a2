"""Plugins: Python files that register custom methods and benchmarks."""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from steppe.errors import UsageError, has_control_characters, one_line, os_error_text, short_repr

_DIGESTS: dict[Path, str] = {}  # SHA-256 of each imported file at import time


def load_plugins(paths: Iterable[str]) -> tuple[str, ...]:
    """Import plugin files, each once per process.

    Args:
        paths: The files.

    Returns:
        Their absolute paths.

    Raises:
        UsageError: A file does not exist or cannot be imported.
    """
    return tuple(str(_import_plugin(path)) for path in paths)


def relocate_plugins(paths: Iterable[str], given: Iterable[str]) -> list[str]:
    """Replace recorded plugin paths by given ones of the same file name.

    Args:
        paths: The paths in a configuration.
        given: The paths given by the user.

    Returns:
        The current paths.
    """
    given = list(given)
    current = {name: path for path in given for name in _file_names(path)}
    return [path if path in given else current.get(Path(path).name, path) for path in paths]


def require_allowed(wanted: Iterable[str], given: Iterable[str]) -> None:
    """Check that the user named all plugins that an untrusted configuration names, since they are code.

    Args:
        wanted: The plugins in the configuration.
        given: The plugins named by the user.

    Raises:
        UsageError: A plugin was not named by the user, or does not exist.
    """
    allowed = {name for path in given for name in _file_names(path)}
    missing = [path for path in wanted if Path(path).name not in allowed]
    for path in missing:
        _require_exists(path)
    if missing:
        noun = "plugin" if len(missing) == 1 else "plugins"
        options = " ".join(f"--plugin {shlex.quote(path)}" for path in missing)
        raise UsageError(
            f"this needs the {noun} {', '.join(missing)}. Plugins are Python code and run only if you name them; "
            f"if you trust this code, pass {options}, or --trust-plugins to run all plugins named there."
        )


def require_known_names(given: Iterable[str], paths: Iterable[str]) -> None:
    """Check that each given plugin replaces a recorded one of the same file name.

    Args:
        given: The plugins named by the user.
        paths: The recorded plugins.

    Raises:
        UsageError: No recorded plugin has this file name.
    """
    names = [Path(path).name for path in paths]
    for path in given:
        if not _file_names(path) & set(names):
            if not names:
                raise UsageError(f"--plugin {path}: the run was started without plugins; leave out --plugin.")
            raise UsageError(
                f"--plugin {path}: expected a file named {' or '.join(names)}, as when the run was started."
            )


def _file_names(path: str) -> set[str]:
    """Return the names of a link and of its target; the latter is the one recorded."""
    try:
        return {Path(path).name, Path(path).resolve().name}
    except (OSError, ValueError):  # reported on import
        return {Path(path).name}


def plugin_digests(paths: Iterable[str]) -> dict[str, str]:
    """Return a digest of each imported plugin by file name, recorded in results as their versions.

    Args:
        paths: Absolute paths of imported plugins.
    """
    versions: dict[str, str] = {}
    for path in map(Path, paths):
        others = [versions[path.name]] if path.name in versions else []
        versions[path.name] = " and ".join([*others, f"sha256:{_DIGESTS[path][:16]}"])
    return versions


def _require_exists(path: str) -> None:
    if has_control_characters(path):
        raise UsageError(f"plugin {short_repr(path)} is not a Python file: its name has unprintable characters.")
    try:
        exists = Path(path).exists()
    except OSError:  # the name is too long
        exists = False
    if not exists:
        raise UsageError(
            f"plugin {path} does not exist; if it has moved, pass its new location as --plugin FILE (same file name)."
        )


def _import_plugin(path: str) -> Path:
    try:
        file = Path(path).resolve()
        name = f"steppe_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    except (OSError, RuntimeError, ValueError) as error:  # an invalid name, or a loop of links
        raise UsageError(f"plugin {short_repr(path)} is not a Python file: {error}.") from error
    if file in _DIGESTS:
        return file
    _require_exists(path)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UsageError(f"plugin {path} is not a Python file.")
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read plugin {path}: {os_error_text(error)}.") from error
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"cannot import plugin {path}: {type(error).__name__}: {one_line(error)}") from error
    _DIGESTS[file] = digest
    return file
