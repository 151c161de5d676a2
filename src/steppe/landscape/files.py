"""The file landscape.json: everything measured for one run, and the settings used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from steppe.errors import DivergedError, RunError, SteppeError, UsageError
from steppe.experiments.config import RunConfig
from steppe.landscape.bound import Bound, NoisyLoss
from steppe.landscape.flatness import Flatness
from steppe.landscape.settings import LandscapeSettings
from steppe.results.file_names import LANDSCAPE
from steppe.results.schema import RunResult
from steppe.runtime.files import explain_write_errors, read_json, write_atomic
from steppe.settings import TrainingConfig

FORMAT = 1
_MAX_BYTES = 100_000_000  # bytes: a hundred tasks after each other, with surfaces
_DIGITS = 6  # significant digits of every number
_THEN, _RESUMED = " && ", " --resume"

_HASHED_NAMES = {new: old for old, new in TrainingConfig.renamed.items()}
"""Settings are hashed under their first names, so that files written before a renaming stay valid."""

Grid = list[list[float]]
T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """The loss of one task around the weights after it or after a later task.

    Attributes:
        losses: g(α), (directions, alphas).
        flatness: Measures of flatness.
        noisy: Losses with noise in the weights, for the bound.
        eigenvalue: Top eigenvalue of the Hessian; None if it was not requested or did not converge.
        surface: Loss over the first two directions, (alphas, alphas); None if it was not requested.
    """

    losses: Grid
    flatness: Flatness
    noisy: NoisyLoss
    eigenvalue: float | None = None
    surface: Grid | None = None


@dataclass
class Landscape:
    """The landscape of one run.

    Tasks are numbered from 1, as in the file names of weights. Numbers are rounded (`round_floats`), so that a resumed
    measurement gives the same file as an uninterrupted one.

    Attributes:
        run: The run's identity: benchmark, method, seed, and a digest of its configuration.
        settings: What it was measured with.
        command: The command, or several in order, that made the file; RUN stands for the run directory.
        versions: Versions of steppe and torch.
        weights: Digest of the weights after each task.
        pairs: The measurements by (after, task).
        bounds: The bound after each task from the second on, if all tasks so far were measured.
    """

    run: dict[str, Any]
    settings: LandscapeSettings
    command: str
    versions: dict[str, str]
    weights: dict[int, str] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    bounds: dict[int, Bound] = field(default_factory=dict)

    @property
    def afters(self) -> list[int]:
        """The measured networks, each by the last task it learned, in order."""
        return sorted({after for after, _ in self.pairs})

    def tasks(self, after: int) -> list[int]:
        """The tasks measured after a task, in order."""
        return sorted(task for column, task in self.pairs if column == after)

    def record_command(self, command: str) -> None:
        """Record a command that adds to the file, unless it is recorded already (an interrupted one was resumed)."""
        if command not in [each.removesuffix(_RESUMED) for each in self.command.split(_THEN)]:
            self.command += f"{_THEN}{command}{_RESUMED}"

    def as_dict(self) -> dict[str, Any]:
        """The content of the file, as plain values."""
        return {
            "format": FORMAT,
            "command": self.command,
            "versions": self.versions,
            "run": self.run,
            "settings": self.settings.as_dict(),
            "alphas": round_floats(self.settings.alphas),
            "weights": {str(after): self.weights[after] for after in sorted(self.weights)},
            "flatness": self._nested(lambda pair: dataclasses.asdict(pair.flatness)),
            "hessian": self._nested(lambda pair: pair.eigenvalue),
            "noise": self._nested(lambda pair: dataclasses.asdict(pair.noisy)),
            "bound": {str(after): dataclasses.asdict(self.bounds[after]) for after in sorted(self.bounds)},
            "profiles": self._nested(lambda pair: pair.losses),
            "surfaces": self._nested(lambda pair: pair.surface),
        }

    def _nested(self, part: Callable[[Pair], Any]) -> dict[str, dict[str, Any]]:
        """One part of every pair that has it, as nested dictionaries [after][task]."""
        found: dict[str, dict[str, Any]] = {}
        for (after, task), pair in sorted(self.pairs.items()):
            if (value := part(pair)) is not None:
                found.setdefault(str(after), {})[str(task)] = value
        return found

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all, with one line for each part.

        Args:
            path: The file.

        Raises:
            DivergedError: A number is not finite.
        """
        try:
            lines = [f"{json.dumps(key)}:{_line(part)}" for key, part in self.as_dict().items()]
        except ValueError as error:  # it could not be read again
            reason = "a number of the landscape is not finite; pass a smaller --range or another --sigma"
            raise DivergedError(f"{path} is not written: {reason}.") from error
        with explain_write_errors(path):
            write_atomic(path, ("{" + ",\n".join(lines) + "}\n").encode())


def _line(part: Any) -> str:
    return json.dumps(part, separators=(",", ":"), allow_nan=False)


def read_landscape(path: Path) -> Landscape:
    """Read and validate a landscape.json.

    Args:
        path: The file, or the run directory that contains it.

    Returns:
        The landscape.

    Raises:
        UsageError: The file does not exist.
        RunError: The file is invalid.
    """  # noqa: DOC501
    file = path / LANDSCAPE if path.is_dir() else path
    if not file.exists():
        raise UsageError(f"{file} does not exist; steppe landscape RUN writes it.")
    try:
        data = read_json(file, _MAX_BYTES)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        return _landscape(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SteppeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise RunError(f"{file} cannot be read as a landscape: {reason}") from error


def _landscape(data: Mapping[str, Any]) -> Landscape:
    settings = LandscapeSettings.from_mapping(data["settings"])
    size = settings.points
    run = dict(data["run"])
    if not run.keys() >= {"benchmark", "method", "seed", "config"}:
        raise ValueError("it does not name its run")
    found = Landscape(run, settings, str(data["command"]), dict(data["versions"]))
    found.weights = {int(after): str(digest) for after, digest in data["weights"].items()}
    found.bounds = {int(after): _build(Bound, bound) for after, bound in data["bound"].items()}
    for after, column in data["profiles"].items():
        for task, losses in column.items():

            def part(key: str, after: str = after, task: str = task) -> Any:
                return data[key].get(after, {}).get(task)

            eigenvalue, surface = part("hessian"), part("surfaces")
            found.pairs[int(after), int(task)] = Pair(
                _grid(losses, settings.directions, size),
                _build(Flatness, part("flatness")),
                _build(NoisyLoss, part("noise")),
                None if eigenvalue is None else _number(eigenvalue),
                None if surface is None else _grid(surface, size, size),
            )
    return found


def _build(kind: type[Any], data: Any) -> Any:
    """Build a dataclass of numbers, optional numbers and such dataclasses from plain values."""
    if not isinstance(data, dict):
        raise ValueError(f"a {kind.__name__} is missing")
    values = {}
    for name, hint in typing.get_type_hints(kind).items():
        value = data[name]
        if dataclasses.is_dataclass(hint):
            values[name] = _build(typing.cast("type[Any]", hint), value)
        else:
            values[name] = None if value is None and hint is not float else _number(value)
    return kind(**values)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _grid(value: Any, rows: int, columns: int) -> Grid:
    if not isinstance(value, list) or len(value) != rows or any(len(row) != columns for row in value):
        raise ValueError(f"losses are not a {rows} × {columns} grid")
    return [[_number(each) for each in row] for row in value]


def round_floats(value: T) -> T:
    """Round every float in plain values or dataclasses to six significant digits.

    Args:
        value: The value.

    Returns:
        A rounded copy.

    Example:
        >>> round_floats({"a": [1.23456789]})
        {'a': [1.23457]}
    """
    found: Any = value
    if isinstance(value, float):
        found = float(f"{value:.{_DIGITS}g}")
    elif isinstance(value, dict):
        found = {key: round_floats(each) for key, each in value.items()}
    elif isinstance(value, list):
        found = [round_floats(each) for each in value]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = dataclasses.replace(value, **{key: round_floats(each) for key, each in vars(value).items()})
    return typing.cast(T, found)


def identity(benchmark: str, method: str, seed: int, config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What identifies a run in landscape.json.

    Args:
        benchmark: Name of the benchmark.
        method: Name of the method.
        seed: Seed of the run.
        config: The run's configuration by section; `run` does not count.

    Returns:
        Benchmark, method and seed, and a digest of all settings its numbers depend on.
    """
    settings = {section: values for section, values in config.items() if section != "run"}
    settings["training"] = {_HASHED_NAMES.get(key, key): value for key, value in config["training"].items()}
    described = json.dumps({"seed": seed, **settings}, sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()[:16]
    return {"benchmark": benchmark, "method": method, "seed": seed, "config": digest}


def identities(result: RunResult) -> list[dict[str, Any]]:
    """The identities that a landscape of a finished run may have.

    Args:
        result: The run's result.

    Returns:
        The run's own identity, then the one that earlier versions wrote: it included settings added after the run, with
        their defaults. The latter is omitted if it cannot be computed.
    """
    configs = [result.config]
    if not result.config["run"].get("plugins"):  # which must not be executed just to read a file
        with suppress(SteppeError):  # settings of a later version, or of a method that is not installed
            configs.append(RunConfig.from_mapping(result.config).as_dict())
    return [identity(result.benchmark, result.method, result.seed, config) for config in configs]


def read_landscape_of(path: Path, result: RunResult) -> Landscape | None:
    """Read the landscape of a finished run.

    Args:
        path: The run directory.
        result: The run's result.

    Returns:
        The landscape; None if the directory has none.

    Raises:
        RunError: It cannot be read or belongs to another run.
    """
    file = path / LANDSCAPE
    if not file.exists():
        return None
    landscape, known = read_landscape(file), identities(result)
    own = {key: landscape.run[key] for key in known[0]}
    if own in known:
        return landscape
    differing = [key for key in ("benchmark", "method", "seed") if own[key] != known[0][key]]
    reason = f"{differing[0]} {own[differing[0]]}, not {known[0][differing[0]]}" if differing else "other settings"
    raise RunError(f"{file} is the landscape of another run ({reason}); remove it and measure again.")
