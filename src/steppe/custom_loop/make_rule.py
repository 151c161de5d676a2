"""Importance rules by name."""

from __future__ import annotations

from steppe.errors import UsageError, short_repr, unknown_name
from steppe.projection.importance import ImportanceRule, Ones, Ridge, Sigmoid, Spectral


def make_rule(importance: object, *, lr: float, temperature: float, alpha: float, ridge: float) -> ImportanceRule:
    """The rule with a name.

    Args:
        importance: The name, or a rule.
        lr: The learning rate of λ, for "sigmoid".
        temperature: The temperature, for "sigmoid".
        alpha: How slowly λ falls, for "spectral".
        ridge: The share of the strongest direction's energy at which λ is about a half, for "ridge".

    Returns:
        The rule.

    Raises:
        UsageError: There is no such rule.
    """  # noqa: DOC501
    if isinstance(importance, str):
        rules: dict[str, ImportanceRule] = {
            "ones": Ones(),
            "sigmoid": Sigmoid(lr, temperature),
            "spectral": Spectral(alpha),
            "ridge": Ridge(ridge),
        }
        if importance not in rules:
            raise unknown_name("importance", importance, rules)
        return rules[importance]
    if not all(hasattr(importance, name) for name in ("dynamic", "initial", "update")):
        raise UsageError(f"importance must be a name or an importance rule, got {short_repr(importance)}.")
    return importance  # type: ignore[return-value]
