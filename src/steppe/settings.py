"""Settings: frozen dataclasses that validate types, ranges, choices and unknown keys.

Methods and benchmarks declare their settings as fields made by `setting`. Values from the command line, TOML files and
keyword arguments all go through the same checks.
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
_MAX_INT = 2**63 - 1  # of tensors and of TOML


@dataclass(frozen=True)
class SearchRange:
    """The values that `steppe search` tries for a setting; made by `log_range`, `linear_range` and `one_of`.

    Attributes:
        low: The smallest value.
        high: The largest value.
        log: Whether values are spread evenly by their logarithm.
        values: The values to choose from, if it is not a range.
    """

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    values: tuple[Value, ...] = ()

    def ends(self) -> tuple[Value, ...]:
        """The values that must be valid for all of it to be valid."""
        return self.values or (self.low, self.high)

    def __str__(self) -> str:
        if self.values:
            return ", ".join(map(str, self.values))
        return f"{self.low:g} to {self.high:g}" + (" (log)" if self.log else "")


def log_range(low: float, high: float) -> SearchRange:
    """Let a search try values from `low` to `high`, spread evenly by their logarithm, as for step sizes.

    Args:
        low: The smallest value, above 0.
        high: The largest value.

    Returns:
        The range.

    Raises:
        UsageError: The ends are not in order, or not above 0.

    Example:
        >>> print(log_range(1e-3, 0.3))
        0.001 to 0.3 (log)
    """
    _check_ends(low, high, above=0)
    return SearchRange(low, high, log=True)


def linear_range(low: float, high: float) -> SearchRange:
    """Let a search try values from `low` to `high`, spread evenly.

    Args:
        low: The smallest value.
        high: The largest value.

    Returns:
        The range.

    Raises:
        UsageError: The ends are not in order.
    """
    _check_ends(low, high)
    return SearchRange(low, high)


def one_of(*values: Value) -> SearchRange:
    """Let a search try these values, in no order.

    Args:
        values: The values.

    Returns:
        The values as a range.

    Raises:
        UsageError: There is no value, or one of another type than a setting's.
    """
    if not values or not all(isinstance(value, (bool, int, float, str)) for value in values):
        raise UsageError(f"one_of needs numbers, texts or booleans; got {short_repr(values)}.")
    return SearchRange(values=tuple(dict.fromkeys(values)))


def without(space: Mapping[str, SearchRange], *names: str) -> dict[str, SearchRange]:
    """The space without these settings, for methods whose other settings make them idle."""
    return {name: values for name, values in space.items() if name not in names}


def _check_ends(low: float, high: float, above: float = -math.inf) -> None:
    numbers = all(isinstance(end, (int, float)) and math.isfinite(end) for end in (low, high))
    if not numbers or not above < low < high:
        least = "" if above == -math.inf else f" above {above:g}"
        raise UsageError(
            f"the range from {short_repr(low)} to {short_repr(high)} is invalid; give two numbers{least}, the smaller "
            "one first."
        )


@dataclass(frozen=True)
class Limits:
    """The documentation of a setting, the values it may take (a range or choices), and those that a search tries."""

    help: str
    above: float | None = None
    below: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    search: SearchRange | None = None

    def describe(self) -> str:
        """Describe the allowed values; empty if every value of the type is allowed."""
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
        """Return whether the value is within the limits."""
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
    search: SearchRange | None = None,
) -> Any:
    """Declare a setting: a dataclass field with documentation and limits.

    Args:
        default: The default value.
        help: One line for `steppe list` and the API reference.
        above: The value must be greater than this.
        below: The value must be less than this.
        at_least: The value must be at least this.
        at_most: The value must be at most this.
        choices: The only valid texts.
        search: What `steppe search` tries, made by `log_range`, `linear_range` or `one_of`; None: it is left alone.

    Returns:
        The dataclass field.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Mine(Settings):
        ...     lr: float = setting(0.1, "step size", above=0)
        >>> Mine(lr=-1)
        Traceback (most recent call last):
        ...
        steppe.errors.UsageError: lr = -1.0 is out of range; it must be above 0.
    """
    limits = Limits(help, above, below, at_least, at_most, choices, search)
    return dataclasses.field(default=default, metadata={"limits": limits})


class Settings:
    """Base class of settings dataclasses; every field is validated on construction."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """New names of renamed settings, by the old names in files of earlier versions."""

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Reject unknown names with the nearest known one, before the dataclass does without."""
        for key in named:
            if key not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
                raise _unknown_setting(cls, key)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, (kind, limits) in self.schema().items():
            value = getattr(self, name)
            if isinstance(value, str) or not limits.choices:  # otherwise the error below lists the choices
                value = _convert(name, value, kind, type(self).__name__)
            if not limits.allows(value):
                allowed = limits.describe() or "finite"
                if isinstance(value, float) and not math.isfinite(value):
                    allowed = "a finite number"
                raise UsageError(f"{name} = {short_repr(value)} is out of range; it must be {allowed}.")
            object.__setattr__(self, name, value)

    @classmethod
    def schema(cls) -> dict[str, tuple[type, Limits]]:
        """Return the type and limits of every setting, in order of declaration."""
        kinds, fields = typing.get_type_hints(cls), {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if "limits" not in field.metadata:
                raise UsageError(f"{cls.__name__}.{field.name}: declare it with steppe.setting(default, help).")
            if kinds[field.name] not in (bool, int, float, str):
                raise UsageError(f"{cls.__name__}.{field.name}: expected type bool, int, float or str.")
            fields[field.name] = kinds[field.name], field.metadata["limits"]
        return fields

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Create the settings from untrusted keys and values.

        Args:
            values: Values by name; missing ones take their defaults.

        Returns:
            The settings.

        Raises:
            UsageError: A name is unknown or a value is invalid.
        """  # noqa: DOC501
        known, values = cls.schema(), cls.rename_old_keys(values)
        for key in values:
            if key not in known:
                raise _unknown_setting(cls, str(key))
        return cls(**values)

    @classmethod
    def rename_old_keys(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with renamed settings under their new names."""
        return {cls.renamed.get(key, key): value for key, value in values.items()}

    @classmethod
    def same_value(cls, key: str, one: str, other: str) -> bool:
        """Return whether two texts are the same value of a setting, such as 0.1 and 1e-1."""
        kind, owner = cls.schema()[key][0], cls.__name__
        return one == other or _convert(key, one, kind, owner) == _convert(key, other, kind, owner)

    def as_dict(self) -> dict[str, Value]:
        """Return the settings as plain values, for config files and records."""
        return {name: getattr(self, name) for name in self.schema()}

    def search_space(self) -> dict[str, SearchRange]:
        """What `steppe search` varies around these settings: by default all that were declared with `search`.

        Override it to leave out settings that have no effect beside the others.

        Returns:
            The ranges by setting.
        """
        return {name: limits.search for name, (_, limits) in self.schema().items() if limits.search is not None}

    def equals(self, values: Any) -> bool:
        """Return whether untrusted plain values equal these settings.

        Missing settings, added after the values were written, count as having their defaults.
        """
        try:
            return self.from_mapping(values) == self
        except (SteppeError, TypeError, AttributeError):
            return False

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some settings changed."""
        return self.from_mapping({**self.as_dict(), **changes})


def _unknown_setting(owner: type[Settings], name: str) -> UsageError:
    return unknown_name(f"setting of {owner.__name__}", name, owner.schema())


def _convert(name: str, value: Any, kind: type, owner: str) -> Value:
    """Convert a value to the setting's type; texts from the command line are parsed, and ints may stand for floats."""
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[str(value).lower()]
        if kind is str and isinstance(value, str):
            if has_control_characters(value):  # also lone surrogates, as in a file name that is not UTF-8
                raise ValueError
            return value
        if kind is int and not isinstance(value, bool):
            whole = int(value)
            if not -_MAX_INT <= whole <= _MAX_INT:
                raise UsageError(
                    f"{name} = {short_repr(value)} is out of range; it must be at most {_MAX_INT} ({owner})."
                )
            if isinstance(value, str) or whole == value:
                return whole
        if kind is float and not isinstance(value, bool):
            return float(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        pass
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "printable text"}[kind]
    raise UsageError(f"{name} = {short_repr(value)} is not {expected} ({owner}).")


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """How to train on a task: epochs, batches, validation. Each benchmark has the paper's values as defaults."""

    renamed: ClassVar[Mapping[str, str]] = {"glances": "updates_per_batch"}

    epochs: int = setting(1, "epochs per task", at_least=1)
    batch_size: int = setting(10, "samples of the current task per batch", at_least=1)
    updates_per_batch: int = setting(1, "updates per batch", at_least=1)
    patience: int = setting(
        0,
        "epochs without a better validation loss before step sizes are reduced; each task ends with its best weights; "
        "0: no validation",
        at_least=0,
    )
    lr_divisor: float = setting(2.0, "factor by which step sizes are reduced, with `patience`", above=1)
    lr_min: float = setting(1e-5, "a task ends when a reduced step size is below this, with `patience`", at_least=0)
    freeze_norms: bool = setting(False, "train scale and shift of normalization layers in the first task only")
    freeze_statistics: bool = setting(
        False, "from the second task on, normalize with the first task's running statistics, also in training"
    )
    precision: str = setting(
        "float32",
        "dtype of matrix products in training; weights, momentum, bases and evaluation stay in float32",
        choices=("float32", "bfloat16"),
    )
