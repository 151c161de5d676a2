"""How layer types are registered: a rule says which vectors the weights of a layer multiply in a call.

A gradient memory computes bases of these vectors (docs/concepts.md: the gradient projection memory). A weight is viewed
as (groups, out / groups, in), and its input vectors as (groups, n, in): each row of the weight's gradient lies in the
span of its group's vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

Rule = Callable[[nn.Module, Tensor], Tensor]
"""Maps a layer and its input to the input vectors of its weight, (groups, n, in)."""

CallRule = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Mapping[str, Tensor]]
"""Maps a layer and the arguments of a call to the input vectors of each of its weights, by name within the layer."""


class Layout(Enum):
    """How a weight is viewed as rows that multiply input vectors."""

    ROWS = "rows"
    """The weight is (out, in / groups, ...)."""
    TRANSPOSED = "transposed"
    """The weight is (in, out / groups, ...), as in transposed convolutions."""
    TABLE = "table"
    """The weight is (in, out), and inputs are one-hot: rules return the indices of rows instead of vectors."""


@dataclass(frozen=True)
class LayerRule:
    """What a gradient memory knows about a layer type."""

    rule: Rule
    weights: tuple[str, ...] = ("weight",)
    """The names of the weights within the layer; `*` stands for anything."""
    call_rule: CallRule | None = None
    """Computes the input vectors of several weights, or from several arguments; `rule` then has nothing to do."""
    layout: Layout = Layout.ROWS

    def has_weight(self, name: str) -> bool:
        """Whether this is the name of one of the weights, within the layer."""
        return any(fnmatchcase(name, pattern) for pattern in self.weights)


RULES: dict[type[nn.Module], LayerRule] = {}


def register_rule(*kinds: type[nn.Module], layout: Layout = Layout.ROWS) -> Callable[[Rule], Rule]:
    """Register a rule for layer types with one weight, `weight`, and for their subclasses.

    Args:
        kinds: The layer types.
        layout: How the weight is viewed.

    Returns:
        A decorator for the rule, a function of the layer and its first argument.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, LayerRule(rule, layout=layout)))
        return rule

    return register


def register_call_rule(
    *kinds: type[nn.Module], weights: tuple[str, ...] = ("weight",), layout: Layout = Layout.ROWS
) -> Callable[[CallRule], CallRule]:
    """Register a rule for layer types with several weights or arguments, and for their subclasses.

    Args:
        kinds: The layer types.
        weights: The names of the weights within the layer; `*` stands for anything.
        layout: How the weights are viewed.

    Returns:
        A decorator for the rule, a function of the layer and a call's positional and keyword arguments.
    """

    def register(rule: CallRule) -> CallRule:
        RULES.update(dict.fromkeys(kinds, LayerRule(as_vectors, weights, rule, layout)))
        return rule

    return register


def as_vectors(layer: nn.Module, x: Tensor) -> Tensor:
    """The rule of weights whose input vectors a call rule has computed."""
    return x


def find_rule(layer: nn.Module) -> LayerRule | None:
    """The rule of a layer: that of its own type, or else of the nearest type that it is derived from; or None."""
    return next((RULES[kind] for kind in type(layer).__mro__ if kind in RULES), None)
