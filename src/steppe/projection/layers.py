"""Which layers a gradient memory covers, and how each turns its input into the columns of R, from which UpdateGPM
makes its bases (docs/concepts.md: the gradient projection memory). A new layer type is one registered function.

A rule maps a layer and its input to a tensor (groups, n, in): every row is one input vector that the layer multiplies
by one row of its weight, viewed as (groups, out / groups, in). Therefore each row of the weight's gradient lies in
the span of these vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import pad

from steppe.errors import ModelError

Rule = Callable[[nn.Module, Tensor], Tensor]
RULES: dict[type[nn.Module], Rule] = {}


def register_rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register a rule for layer types (and their subclasses)."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


@register_rule(nn.Linear)
def linear_inputs(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer's input vectors; every dimension but the last counts samples."""
    return x.reshape(1, -1, x.shape[-1])


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution_patches(layer: nn.Module, x: Tensor) -> Tensor:
    """All patches a convolution looks at, padding included, in the order of weight.view(out, -1); a lone sample may
    come without a batch around it.
    """
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    space = len(layer.kernel_size)
    x = x if x.ndim == space + 2 else x.unsqueeze(0)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = pad(x, padding(layer), mode=mode)
    for axis, (size, step, gap) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
    samples, channels = x.shape[:2]
    x = x.reshape(samples, layer.groups, channels // layer.groups, *x.shape[2:])
    # (samples, groups, channels, places..., taps...) -> (groups, samples, places..., channels, taps...)
    places = range(3, 3 + space)
    taps = range(3 + space, 3 + 2 * space)
    x = x.permute(1, 0, *places, 2, *taps)
    return x.reshape(layer.groups, -1, channels // layer.groups * math.prod(layer.kernel_size))


def padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """The padding before and after each axis, the last axis first, as `pad` wants it."""
    amounts: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            amounts += [total // 2, total - total // 2]
        elif layer.padding == "valid":
            amounts += [0, 0]
        else:
            amounts += [int(layer.padding[axis])] * 2
    return amounts


@dataclass(frozen=True)
class ProjectedWeight:
    """One weight that the memory covers, with every layer that uses it."""

    name: str
    layers: tuple[nn.Module, ...]
    rule: Rule
    factorable: bool = False
    """Whether its gradient may be had as factors of inputs and output gradients (see `linear_calls`)."""


def projected_weights(model: nn.Module, exclude: tuple[str, ...] = ()) -> dict[str, ProjectedWeight]:
    """The trainable weights of all layers that have a rule, by parameter name, but for those excluded by the name of
    the weight or of a layer that uses it.

    A weight shared by several covered layers is covered once, with the inputs of all of them. A weight shared with a
    module of another kind is refused: that module's gradient would not lie in the span of the layer's inputs.
    """
    found: dict[str, ProjectedWeight] = {}
    for name, users in _users(model).items():
        if not users[0].parameter.requires_grad or any(_is_excluded(name, user.path, exclude) for user in users):
            continue
        strangers = [user.path for user in users if user.rule is None]
        if len(strangers) == len(users):
            continue
        if strangers:
            raise ModelError(
                f"the weight {name!r} is shared with {strangers[0]!r}, which is no linear or convolution layer: "
                f"its gradient cannot be projected. Untie it, or leave it out with exclude=({name!r},)."
            )
        rule = users[0].rule
        assert rule is not None
        found[name] = ProjectedWeight(name, tuple(user.module for user in users), rule)
    return found


def coverable_weights(model: nn.Module) -> dict[str, ProjectedWeight]:
    """Every weight that a layer with a rule uses, whatever else does and whether or not it is to be covered."""
    return {
        name: ProjectedWeight(name, tuple(user.module for user in ruled), ruled[0].rule)
        for name, users in _users(model).items()
        if (ruled := [user for user in users if user.rule is not None]) and ruled[0].rule is not None
    }


class _User(NamedTuple):
    """A module that holds a parameter, with the rule by which it would be covered."""

    path: str
    module: nn.Module
    parameter: nn.Parameter
    rule: Rule | None


def _users(model: nn.Module) -> dict[str, list[_User]]:
    """The modules that hold each parameter, by the parameter's name; a shared parameter has several."""
    names = {id(p): name for name, p in model.named_parameters()}  # a shared parameter appears once
    # nn.MultiheadAttention computes with its parts' weights without calling them, so their inputs are never seen.
    opaque = {id(part) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for part in m.modules()}
    users: dict[str, list[_User]] = {name: [] for name in names.values()}
    for path, module in model.named_modules():
        rule = next((rule for kind, rule in RULES.items() if isinstance(module, kind)), None)
        for own, parameter in module.named_parameters(recurse=False):
            ruled = rule if own == "weight" and id(module) not in opaque else None
            users[names[id(parameter)]].append(_User(path, module, parameter, ruled))
    return users


def require_covered(covered: Mapping[str, ProjectedWeight]) -> None:
    """Refuse a model that gives a gradient memory nothing to cover."""
    if not covered:
        raise ModelError(
            "the model has no layer that a gradient memory can cover (Linear, Conv1d, Conv2d, Conv3d with a "
            "trainable weight, the head of a multi-head model aside): use a replay method such as er."
        )


def _is_excluded(name: str, path: str, exclude: tuple[str, ...]) -> bool:
    return any(entry in (name, path) or path.startswith(entry + ".") for entry in exclude)
