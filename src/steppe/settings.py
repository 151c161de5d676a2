"""Settings as frozen dataclasses that check themselves: types, ranges, choices, unknown keys.

A method or a benchmark declares its settings as fields made by `setting`; everything that enters from outside
(command line, TOML, keyword arguments) passes through the same checks.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from steppe.errors import SteppeError, UsageError, has_control_characters, short_repr, unknown_name

Value = bool | int | float | str
_LARGEST = 2**63 - 1  # the largest whole number of tensors and of TOML


@dataclass(frozen=True)
class Limits:
    """What a setting may be: a documented range or a list of choices."""

    help: str
    above: float | None = None
    below: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """The allowed values in words, empty where everything of the type is allowed."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = (
            (self.above, "above"),
            (self.at_least, "at least"),
            (self.below, "below"),
            (self.at_most, "at most"),
        )
        return " and ".join(f"{word} {bound:g}" for bound, word in bounds if bound is not None)

    def allows(self, value: Value) -> bool:
        """Whether the value lies within the limits."""
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if isinstance(value, (bool, str)):
            return True
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )


def setting(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    below: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its documentation and its limits."""
    limits = Limits(help, above, below, at_least, at_most, choices)
    return dataclasses.field(default=default, metadata={"limits": limits})


class Settings:
    """Base of settings dataclasses: checks every field when made, whoever makes it."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Current names of settings by their old names, which files of earlier versions contain."""

    def __post_init__(self) -> None:
        for name, (kind, limits) in self.schema().items():
            value = getattr(self, name)
            if isinstance(value, str) or not limits.choices:  # else it is none of them, and which there are is said
                value = _convert(name, value, kind, type(self).__name__)
            if not limits.allows(value):
                allowed = limits.describe() or "finite"
                if isinstance(value, float) and not math.isfinite(value):
                    allowed = "a finite number"
                raise UsageError(f"{name} = {short_repr(value)} is out of range: it must be {allowed}.")
            object.__setattr__(self, name, value)

    @classmethod
    def schema(cls) -> dict[str, tuple[type, Limits]]:
        """Every setting's type and limits, in the order of declaration."""
        kinds, found = typing.get_type_hints(cls), {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if "limits" not in field.metadata:
                raise UsageError(f"{cls.__name__}.{field.name}: declare it by steppe.setting(default, help).")
            if kinds[field.name] not in (bool, int, float, str):
                raise UsageError(f"{cls.__name__}.{field.name}: its type must be bool, int, float or str.")
            found[field.name] = kinds[field.name], field.metadata["limits"]
        return found

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Make the settings from untrusted keys and values; unknown keys are refused by name."""
        known, values = cls.schema(), cls.rename_old_keys(values)
        for key in values:
            if key not in known:
                raise unknown_name(f"setting of {cls.__name__}", str(key), known)
        return cls(**values)

    @classmethod
    def rename_old_keys(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same values, with settings that have been renamed under their current names."""
        return {cls.renamed.get(key, key): value for key, value in values.items()}

    @classmethod
    def same_value(cls, key: str, one: str, other: str) -> bool:
        """Whether two texts are the same value of a setting."""
        kind, owner = cls.schema()[key][0], cls.__name__
        return one == other or _convert(key, one, kind, owner) == _convert(key, other, kind, owner)

    def as_dict(self) -> dict[str, Value]:
        """The settings as plain values, for config files and records."""
        return {name: getattr(self, name) for name in self.schema()}

    def equals(self, values: Any) -> bool:
        """Whether plain values, which may be of any kind, are these settings; what they lack, because it came after
        them, counts as having its default.
        """
        try:
            return self.from_mapping(values) == self
        except (SteppeError, TypeError, AttributeError):
            return False

    def replace(self, **changes: Any) -> Self:
        """The same settings with some changed, checked again."""
        return self.from_mapping({**self.as_dict(), **changes})


def _convert(name: str, value: Any, kind: type, owner: str) -> Value:
    """The value as the setting's type: text from a command line is parsed, an int may stand for a float."""
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[str(value).lower()]
        if kind is str and isinstance(value, str):
            if has_control_characters(value):  # half a character too, as in a file's name that is not UTF-8
                raise ValueError
            return value
        if kind is int and not isinstance(value, bool):
            whole = int(value)
            if not -_LARGEST <= whole <= _LARGEST:
                raise UsageError(
                    f"{name} = {short_repr(value)} is out of range: it must be at most {_LARGEST} ({owner})."
                )
            if isinstance(value, str) or whole == value:
                return whole
        if kind is float and not isinstance(value, bool):
            return float(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        pass
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text that can be shown"}[kind]
    raise UsageError(f"{name} = {short_repr(value)} is not {wanted} ({owner}).")


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """Epochs, batches, validation; a benchmark carries the paper's values."""

    renamed: ClassVar[Mapping[str, str]] = {"glances": "updates_per_batch"}

    epochs: int = setting(1, "passes over a task's samples", at_least=1)
    batch_size: int = setting(10, "samples of the current task in a batch", at_least=1)
    updates_per_batch: int = setting(1, "updates made on each batch", at_least=1)
    patience: int = setting(
        0,
        "epochs without a better validation loss before the step sizes are cut; the best weights are kept in the end; "
        "0: no validation",
        at_least=0,
    )
    lr_divisor: float = setting(2.0, "by what a cut divides the step sizes, with `patience`", above=1)
    lr_min: float = setting(1e-5, "a cut to a step size below this ends the task, with `patience`", at_least=0)
    freeze_norms: bool = setting(False, "learn scale and shift of normalisation layers in the first task only")
    freeze_statistics: bool = setting(
        False, "from the second task on, normalise by the first task's running statistics, in training too"
    )
    precision: str = setting(
        "float32",
        "in what the network multiplies in training; weights, momentum, bases, validation and tests are float32",
        choices=("float32", "bfloat16"),
    )
