"""Users' own files, which register methods and benchmarks."""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from steppe.errors import UsageError, has_control_characters, one_line, os_error_text, short_repr

_DIGESTS: dict[Path, str] = {}  # of the files imported so far, as they were then


def load_plugins(paths: Iterable[str]) -> tuple[str, ...]:
    """Import the files, each once per process; gives their whole paths."""
    return tuple(str(_import_plugin(path)) for path in paths)


def relocate_plugins(paths: Iterable[str], given: Iterable[str]) -> list[str]:
    """The files where they lie now: of those given, the ones of the same names serve in their place."""
    given = list(given)
    places = {name: path for path in given for name in _file_names(path)}
    return [path if path in given else places.get(Path(path).name, path) for path in paths]


def require_allowed(wanted: Iterable[str], given: Iterable[str]) -> None:
    """Refuse plugins that a file names and the user did not: they are code, and the file may be a stranger's."""
    chosen = {name for path in given for name in _file_names(path)}
    missing = [path for path in wanted if Path(path).name not in chosen]
    for path in missing:
        _require_exists(path)
    if missing:
        told = "the plugin" if len(missing) == 1 else "the plugins"
        typed = " ".join(f"--plugin {shlex.quote(path)}" for path in missing)
        raise UsageError(
            f"this needs {told} {', '.join(missing)}, Python code that is only run if you name it: if you trust it, "
            f"add {typed}, or --trust-plugins to run whatever plugins are named there."
        )


def require_known_names(given: Iterable[str], paths: Iterable[str]) -> None:
    """Refuse a file that is given for a plugin that has moved, but is called like none of them."""
    names = [Path(path).name for path in paths]
    for path in given:
        if not _file_names(path) & set(names):
            told = f"those it was made with are called {', '.join(names)}" if names else "it was made without any"
            raise UsageError(f"--plugin {path}: {told}; give files of the same names.")


def _file_names(path: str) -> set[str]:
    """What a file is called: a link's own name and that of the file it leads to, which is the one that is recorded."""
    try:
        return {Path(path).name, Path(path).resolve().name}
    except (OSError, ValueError):  # told when it is imported
        return {Path(path).name}


def plugin_digests(paths: Iterable[str]) -> dict[str, str]:
    """The files by name, with a digest of what was imported from them, for a result to name its code by."""
    found: dict[str, str] = {}
    for path in map(Path, paths):
        others = [found[path.name]] if path.name in found else []
        found[path.name] = " and ".join([*others, f"sha256:{_DIGESTS[path][:16]}"])
    return found


def _require_exists(path: str) -> None:
    if has_control_characters(path):
        raise UsageError(f"the plugin {short_repr(path)} is no Python file: its name cannot be shown.")
    try:
        there = Path(path).exists()
    except OSError:  # no file can have so long a name
        there = False
    if not there:
        raise UsageError(
            f"the plugin {path} is not there: if it lies elsewhere now, say where, by --plugin FILE (of the same name)."
        )


def _import_plugin(path: str) -> Path:
    try:
        file = Path(path).resolve()
        name = f"steppe_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    except (OSError, RuntimeError, ValueError) as error:  # no file can have such a name, or links go in a circle
        raise UsageError(f"the plugin {short_repr(path)} is no Python file: {error}.") from error
    if file in _DIGESTS:
        return file
    _require_exists(path)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UsageError(f"the plugin {path} is no Python file.")
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"the plugin {path} cannot be read: {os_error_text(error)}.") from error
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"the plugin {path} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    _DIGESTS[file] = digest
    return file
