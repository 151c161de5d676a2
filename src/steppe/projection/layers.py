"""The layers that a gradient memory can cover, and their weights. `projection/rules` has a file per family of layers.

To add a layer type, register a rule (docs/recipes/own-layer.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from steppe.errors import ModelError
from steppe.projection.rules.convolution import convolution_patches
from steppe.projection.rules.linear import linear_inputs
from steppe.projection.rules.registry import (
    RULES,
    CallRule,
    LayerRule,
    Layout,
    Rule,
    find_rule,
    register_call_rule,
    register_rule,
)
from steppe.projection.weight_norm import WeightNorm, find_weight_norms

__all__ = [
    "RULES",
    "CallRule",
    "Layout",
    "ProjectedWeight",
    "Rule",
    "convolution_patches",
    "coverable_weights",
    "linear_inputs",
    "projected_weights",
    "register_call_rule",
    "register_rule",
    "require_covered",
]


@dataclass(frozen=True)
class ProjectedWeight:
    """A weight that the memory covers, with every layer that uses it."""

    name: str
    layers: tuple[nn.Module, ...]
    rule: Rule
    """Maps a layer and what it multiplies in a call (see `hooks.capture_inputs`) to the weight's input vectors."""
    factorable: bool = False
    """Whether its gradient can be computed as factors: inputs and output gradients (see `fast.linear_hooks`)."""
    names: tuple[str, ...] = ()
    """The weight's name within each layer, if it is not `weight` in all of them."""
    call_rule: CallRule | None = None
    """Computes the input vectors from all arguments of a call, if the first one is not enough."""
    layout: Layout = Layout.ROWS
    """How the weight is viewed as rows that multiply input vectors."""
    norm: WeightNorm | None = None
    """If it is the direction v of a normalized weight: how the weight is computed."""

    @property
    def uses(self) -> dict[tuple[nn.Module, str], None]:
        """The layers that use it, each with the weight's name within it."""
        return dict.fromkeys(zip(self.layers, self.names or ("weight",) * len(self.layers), strict=True))

    @property
    def parameter(self) -> nn.Parameter:
        """The weight itself."""
        layer, name = next(iter(self.uses))
        return layer.get_parameter(name)

    @property
    def scale(self) -> nn.Parameter:
        """The scale g of a normalized weight."""
        assert self.norm is not None
        return self.layers[0].get_parameter(self.norm.scale)

    @property
    def scale_name(self) -> str:
        """The name of the scale in the model."""
        assert self.norm is not None
        return self.name.removesuffix(self.norm.direction) + self.norm.scale

    def name_in_calls(self, name: str) -> str:
        """The name by which a call rule knows a weight, given its name within the layer."""
        return name if self.norm is None else self.norm.weight


def projected_weights(model: nn.Module, exclude: tuple[str, ...] = ()) -> dict[str, ProjectedWeight]:
    """The trainable weights of all layers that have a rule.

    A weight shared by several covered layers is covered once, with the inputs of all of them.

    Args:
        model: The model.
        exclude: Names of weights, and of layers whose weights to leave out.

    Returns:
        The weights, by parameter name.

    Raises:
        ModelError: If a weight is shared with a module without a rule or with another one, so that the gradient would
            not lie in the span of the layers' inputs.

    Example:
        >>> import torch
        >>> from steppe.projection.layers import projected_weights
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
        >>> list(projected_weights(model)), list(projected_weights(model, exclude=("2",)))
        (['0.weight', '2.weight'], ['0.weight'])
    """
    weights: dict[str, ProjectedWeight] = {}
    for name, users in _users(model).items():
        if not users[0].parameter.requires_grad or any(_is_excluded(name, user.path, exclude) for user in users):
            continue
        ruled = [user for user in users if user.rule is not None]
        if not ruled or not all(user.can_step for user in users):
            continue
        first = ruled[0]
        other = next((u.path for u in users if u.rule != first.rule or (u.norm is not None and u != first)), None)
        if other is not None:
            raise ModelError(
                f"the weight {name!r} is shared with {other!r}, which uses it in another way than {first.path!r}, "
                f"so its gradient cannot be projected: untie it, or leave it out with exclude=({name!r},)."
            )
        weights[name] = _projected(name, ruled)
    return weights


def coverable_weights(model: nn.Module) -> dict[str, ProjectedWeight]:
    """All weights of layers with a rule, including frozen ones and those shared with other modules."""
    return {
        name: _projected(name, [user for user in users if user.rule == ruled.rule])
        for name, users in _users(model).items()
        if (ruled := next((user for user in users if user.rule is not None), None)) is not None and ruled.can_step
    }


class _User(NamedTuple):
    """A module that has a parameter, with its name there and the rule that would cover it."""

    path: str
    module: nn.Module
    parameter: nn.Parameter
    name: str
    rule: LayerRule | None
    norm: WeightNorm | None = None

    @property
    def can_step(self) -> bool:
        """Whether both parts of the weight learn, if it is normalized."""
        return self.norm is None or self.module.get_parameter(self.norm.scale).requires_grad


def _projected(name: str, users: list[_User]) -> ProjectedWeight:
    rule = users[0].rule
    assert rule is not None
    own = tuple(user.name for user in users)
    return ProjectedWeight(
        name,
        tuple(user.module for user in users),
        rule.rule,
        names=own if set(own) != {"weight"} else (),
        call_rule=rule.call_rule,
        layout=rule.layout,
        norm=users[0].norm,
    )


def _users(model: nn.Module) -> dict[str, list[_User]]:
    """The modules that use each parameter, by the parameter's name; a shared parameter has several.

    A weight inside a layer's submodule belongs to the layer whose rule names it: attention uses its output projection
    without calling it.

    Args:
        model: The model.

    Returns:
        The users by name.
    """
    names = {id(p): name for name, p in model.named_parameters()}  # a shared parameter appears once
    users: dict[str, list[_User]] = {name: [] for name in names.values()}
    taken: set[tuple[int, str]] = set()  # modules and names of parameters that another layer's rule names
    for path, module in model.named_modules():
        rule = find_rule(module)
        for own, norm in _weights_of(module, rule):
            owner, _, last = own.rpartition(".")
            place = id(module.get_submodule(owner)), last
            if place not in taken:
                taken.add(place)
                parameter = module.get_parameter(own)
                users[names[id(parameter)]].append(_User(path, module, parameter, own, rule, norm))
        for own, parameter in module.named_parameters(recurse=False):
            if (id(module), own) not in taken:
                users[names[id(parameter)]].append(_User(path, module, parameter, own, None))
    return users


def _weights_of(layer: nn.Module, rule: LayerRule | None) -> Iterator[tuple[str, WeightNorm | None]]:
    """The names within a layer of its weights, or of the directions of those that are normalized."""
    if rule is None:
        return
    norms = list(find_weight_norms(layer))
    parts = {part for norm in norms for part in (norm.direction, norm.scale)}
    for name, _ in layer.named_parameters(remove_duplicate=False):
        if rule.has_weight(name) and name not in parts:
            yield name, None
    for norm in norms:
        if rule.has_weight(norm.weight):
            yield norm.direction, norm


def require_covered(covered: Mapping[str, ProjectedWeight]) -> None:
    """Reject a model without weights to cover."""
    if not covered:
        raise ModelError(
            "the model has no layer that a gradient memory can cover (such as Linear, Conv2d, LSTM or Embedding, with "
            "a trainable weight, other than the head of a multi-head model): use a replay method such as er."
        )


def _is_excluded(name: str, path: str, exclude: tuple[str, ...]) -> bool:
    return any(entry == path or f"{each}.".startswith(f"{entry}.") for entry in exclude for each in (name, path))
