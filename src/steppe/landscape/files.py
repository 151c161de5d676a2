"""landscape.json: everything measured of one run, with what it was measured with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from steppe.errors import DivergedError, RunError, SteppeError, UsageError
from steppe.experiments.config import RunConfig
from steppe.landscape.bound import Bound, Noisy
from steppe.landscape.flatness import Flatness
from steppe.landscape.settings import LandscapeSettings
from steppe.runtime.files import explain_write_errors, read_json, write_atomic

LANDSCAPE = "landscape.json"
FORMAT = 1
_LARGEST = 100_000_000  # bytes: of a hundred tasks after each other, on surfaces
_DIGITS = 6  # significant ones, of every number
_THEN, _WENT_ON = " && ", " --resume"

Grid = list[list[float]]
T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """One task as the network after another one, or after itself, sees it."""

    losses: Grid
    """g(α), (directions, alphas)."""
    flatness: Flatness
    noisy: Noisy
    eigenvalue: float | None = None
    """The top eigenvalue of the Hessian, where it was asked for and found."""
    surface: Grid | None = None
    """The loss over the first two directions, (alphas, alphas), where it was asked for."""


@dataclass
class Landscape:
    """A run's landscape. Tasks count from 1, as in the names of the weights' files; numbers are `rounded`, so that what
    is put together from a file does not differ from what is measured at one go.
    """

    run: dict[str, Any]
    """benchmark, method, seed, and `config`, which differs whenever a setting of the run does."""
    settings: LandscapeSettings
    command: str
    """What made the file, for any run directory: one command, or several that went on with it, in their order."""
    versions: dict[str, str]
    weights: dict[int, str] = field(default_factory=dict)
    """For every network looked at, what tells its weights from others."""
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    """By (after which task, which task)."""
    bounds: dict[int, Bound] = field(default_factory=dict)
    """By after which task; there from the second on, where every task so far was measured."""

    @property
    def afters(self) -> list[int]:
        """The networks looked at, in order."""
        return sorted({after for after, _ in self.pairs})

    def tasks(self, after: int) -> list[int]:
        """The tasks measured at one of them, in order."""
        return sorted(task for column, task in self.pairs if column == after)

    def made_by(self, command: str) -> None:
        """Tell of a command that adds something, unless it is known to have done so: what was stopped goes on by it."""
        if command not in [each.removesuffix(_WENT_ON) for each in self.command.split(_THEN)]:
            self.command += f"{_THEN}{command}{_WENT_ON}"

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "format": FORMAT,
            "command": self.command,
            "versions": self.versions,
            "run": self.run,
            "settings": self.settings.as_dict(),
            "alphas": rounded(self.settings.alphas),
            "weights": {str(after): self.weights[after] for after in sorted(self.weights)},
            "flatness": self._nested(lambda pair: dataclasses.asdict(pair.flatness)),
            "hessian": self._nested(lambda pair: pair.eigenvalue),
            "noise": self._nested(lambda pair: dataclasses.asdict(pair.noisy)),
            "bound": {str(after): dataclasses.asdict(self.bounds[after]) for after in sorted(self.bounds)},
            "profiles": self._nested(lambda pair: pair.losses),
            "surfaces": self._nested(lambda pair: pair.surface),
        }

    def _nested(self, part: Callable[[Pair], Any]) -> dict[str, dict[str, Any]]:
        """One part of every pair that has it, by after which task and by task."""
        found: dict[str, dict[str, Any]] = {}
        for (after, task), pair in sorted(self.pairs.items()):
            if (value := part(pair)) is not None:
                found.setdefault(str(after), {})[str(task)] = value
        return found

    def write(self, path: Path) -> None:
        """Write the file; it appears whole or not at all. Each part stands on a line of its own."""
        try:
            lines = [f"{json.dumps(key)}:{_line(part)}" for key, part in self.as_dict().items()]
        except ValueError as error:  # it could not be read again
            told = "a number of the landscape is not finite: look less far (--range), or change --sigma"
            raise DivergedError(f"{path} is not written, for {told}.") from error
        with explain_write_errors(path):
            write_atomic(path, ("{" + ",\n".join(lines) + "}\n").encode())


def _line(part: Any) -> str:
    return json.dumps(part, separators=(",", ":"), allow_nan=False)


def read_landscape(path: Path) -> Landscape:
    """From a landscape.json, or the run directory that holds one; every part is checked."""
    file = path / LANDSCAPE if path.is_dir() else path
    if not file.exists():
        raise UsageError(f"{file} is not there: steppe landscape RUN writes it.")
    try:
        data = read_json(file, _LARGEST)
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
        raise ValueError("it does not say which run it is of")
    found = Landscape(run, settings, str(data["command"]), dict(data["versions"]))
    found.weights = {int(after): str(digest) for after, digest in data["weights"].items()}
    found.bounds = {int(after): _made(Bound, bound) for after, bound in data["bound"].items()}
    for after, column in data["profiles"].items():
        for task, losses in column.items():

            def part(key: str, after: str = after, task: str = task) -> Any:
                return data[key].get(after, {}).get(task)

            eigenvalue, surface = part("hessian"), part("surfaces")
            found.pairs[int(after), int(task)] = Pair(
                _grid(losses, settings.directions, size),
                _made(Flatness, part("flatness")),
                _made(Noisy, part("noise")),
                None if eigenvalue is None else _number(eigenvalue),
                None if surface is None else _grid(surface, size, size),
            )
    return found


def _made(kind: type[Any], data: Any) -> Any:
    """A dataclass of numbers, of numbers that may lack, and of such dataclasses, from plain values."""
    if not isinstance(data, dict):
        raise ValueError(f"a {kind.__name__} is missing")
    values = {}
    for name, hint in typing.get_type_hints(kind).items():
        value = data[name]
        if dataclasses.is_dataclass(hint):
            values[name] = _made(typing.cast("type[Any]", hint), value)
        else:
            values[name] = None if value is None and hint is not float else _number(value)
    return kind(**values)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _grid(value: Any, rows: int, columns: int) -> Grid:
    if not isinstance(value, list) or len(value) != rows or any(len(row) != columns for row in value):
        raise ValueError(f"losses are not {rows} by {columns}")
    return [[_number(each) for each in row] for row in value]


def rounded(value: T) -> T:
    """Every float in plain values or dataclasses with six significant digits."""
    found: Any = value
    if isinstance(value, float):
        found = float(f"{value:.{_DIGITS}g}")
    elif isinstance(value, dict):
        found = {key: rounded(each) for key, each in value.items()}
    elif isinstance(value, list):
        found = [rounded(each) for each in value]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = dataclasses.replace(value, **{key: rounded(each) for key, each in vars(value).items()})
    return typing.cast(T, found)


def identity(result: Mapping[str, Any]) -> dict[str, Any]:
    """What names a run: benchmark, method and seed, and a digest of all settings that its numbers depend on.

    Of a result.json, or of as much of it as is known before the end.
    """
    named = {key: result[key] for key in ("benchmark", "method", "seed")}
    settings = {section: values for section, values in result["config"].items() if section != "run"}
    described = json.dumps({"seed": result["seed"], **settings}, sort_keys=True)
    return {**named, "config": hashlib.sha256(described.encode()).hexdigest()[:16]}


def read_landscape_of(path: Path, result: Mapping[str, Any]) -> Landscape | None:
    """The landscape in a finished run's directory, None where there is none; one of another run is refused."""
    file = path / LANDSCAPE
    if not file.exists():
        return None
    found, own = read_landscape(file), identity(result)
    for key in ("benchmark", "method", "seed"):
        if found.run[key] != own[key]:
            raise _of_another(file, f"{key} {found.run[key]}, not {own[key]}")
    if found.run["config"] not in (own["config"], _with_later_settings(result)):
        raise _of_another(file, "other settings")
    return found


def _with_later_settings(result: Mapping[str, Any]) -> str | None:
    """The digest of the run with the defaults of settings that came after it, as earlier versions took it. Nobody's
    plugin is run for it.
    """
    if result["config"]["run"].get("plugins"):
        return None
    try:
        filled = RunConfig.from_mapping(result["config"]).as_dict()
    except SteppeError:  # settings of a later version, or of a method of somebody's own
        return None
    return str(identity({**result, "config": filled})["config"])


def _of_another(file: Path, told: str) -> RunError:
    return RunError(f"{file} is the landscape of another run ({told}): remove it and measure again.")
