"""Search spaces: what a search varies, from declarations, command lines and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from steppe.errors import UsageError, short_repr, unknown_name
from steppe.settings import SearchRange, Settings, Value, linear_range, log_range, one_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Space = dict[str, SearchRange]
"""The values to try, by setting."""


def build_space(settings: Settings, default: Mapping[str, SearchRange], changes: Mapping[str, SearchRange]) -> Space:
    """Return the space of a search: the default one with changes, widened to hold the given settings themselves.

    Args:
        settings: The settings to start from. They are the first trial.
        default: The space without changes.
        changes: Ranges to add or to replace.

    Returns:
        The space.

    Raises:
        UsageError: A range belongs to no setting or holds invalid values, or there is nothing to search.
    """  # noqa: DOC501
    schema, values = type(settings).schema(), settings.as_dict()
    for name in changes:
        if name not in schema:
            raise unknown_name(f"setting of {type(settings).__name__}", name, schema)
    space = {}
    for name, tried in {**default, **changes}.items():
        kind = schema[name][0]
        if not tried.values and kind not in (int, float):
            raise UsageError(f"{name}: a range needs a setting that is a number; list the values instead.")
        made = [getattr(settings.replace(**{name: end}), name) for end in tried.ends()]  # rejects invalid values
        space[name] = one_of(*made) if tried.values else SearchRange(made[0], made[1], tried.log)
        space[name] = _widened(space[name], values[name])
    if not space:
        raise UsageError(
            f"there is nothing to search: {type(settings).__name__} declares no range; add one, such as "
            "lr=0.001:0.1:log."
        )
    return space


def _widened(tried: SearchRange, value: Value) -> SearchRange:
    """The range with this value in it, unless it is on a logarithmic scale and the value is not above 0."""
    if tried.values:
        return one_of(*tried.values, value)
    assert not isinstance(value, str)
    if tried.log and value <= 0:
        return tried
    return SearchRange(min(tried.low, value), max(tried.high, value), tried.log)


def holds(tried: SearchRange, value: Value) -> bool:
    """Return whether a value is one of those that are tried."""
    return value in tried.values if tried.values else tried.low <= value <= tried.high  # type: ignore[operator]


def parse_ranges(texts: Iterable[str], settings: type[Settings]) -> Space:
    """Parse `KEY=LOW:HIGH`, `KEY=LOW:HIGH:log` and `KEY=A,B,C`.

    Args:
        texts: The arguments of `--space`.
        settings: The class of the settings.

    Returns:
        The ranges by setting.

    Raises:
        UsageError: A text has another form, or its setting is unknown or named twice.

    Example:
        >>> from steppe.methods import ER
        >>> print(parse_ranges(["lr=0.001:0.1:log"], ER)["lr"])
        0.001 to 0.1 (log)
    """  # noqa: DOC501
    space: Space = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().removeprefix("method.")
        if not equals or not values.strip():
            raise UsageError(f"--space {text}: expected KEY=LOW:HIGH, KEY=LOW:HIGH:log or KEY=A,B,C.")
        if name not in settings.schema():
            raise unknown_name("setting of the method", name, settings.schema())
        if name in space:
            raise UsageError(f"--space: {name} is given twice; give it once.")
        space[name] = _parse_range(text, values)
    return space


def _parse_range(text: str, values: str) -> SearchRange:
    parts = [part.strip() for part in values.split(":")]
    if len(parts) == 1:
        return one_of(*(part.strip() for part in values.split(",")))
    try:
        low, high = (float(part) for part in parts[:2])
        if len(parts) > 3 or (len(parts) == 3 and parts[2] != "log"):
            raise ValueError
    except ValueError:
        raise UsageError(f"--space {text}: expected KEY=LOW:HIGH, KEY=LOW:HIGH:log or KEY=A,B,C.") from None
    return log_range(low, high) if len(parts) == 3 else linear_range(low, high)


def as_plain(space: Mapping[str, SearchRange]) -> dict[str, Any]:
    """Return the space as plain values, for JSON."""
    return {name: {**asdict(tried), "values": list(tried.values)} for name, tried in space.items()}


def from_plain(data: Any) -> Space:
    """Return the space in untrusted plain values; raises ValueError, TypeError or KeyError if they are none."""
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{short_repr(data)} is not a search space")
    return {str(name): _range_from_plain(values) for name, values in data.items()}


def _range_from_plain(data: Any) -> SearchRange:
    try:
        if data["values"]:
            return one_of(*data["values"])
        return (log_range if data["log"] else linear_range)(data["low"], data["high"])
    except UsageError as error:
        raise ValueError(str(error)) from error


def distribution(tried: SearchRange, kind: type) -> BaseDistribution:
    """Return Optuna's form of a range for a setting of this type."""
    from optuna import distributions

    if tried.values:
        return distributions.CategoricalDistribution(list(tried.values))
    if kind is int:
        return distributions.IntDistribution(round(tried.low), round(tried.high), log=tried.log)
    return distributions.FloatDistribution(tried.low, tried.high, log=tried.log)
