"""Record the inputs and outputs of linear layers during a forward pass, so that gradients can stay factored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from steppe.fast.agreement import agree
from steppe.fast.factored import FactoredGrad
from steppe.fast.switch import fast_paths_enabled
from steppe.runtime.hooks import temporary_hooks
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, clone_nest


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One call of a linear layer.

    The edge of the output is taken at once, so an operation that overwrites the output later (in-place ReLU) does no
    harm.
    """

    input: Tensor
    """Its input vectors, (rows, in)."""
    output: GradientEdge
    """Where its output is in the autograd graph."""

    @property
    def rows(self) -> int:
        """The number of input vectors."""
        return self.input.shape[0]


@contextmanager
def record_linear_calls(linear: Mapping[str, Sequence[nn.Module]]) -> Iterator[dict[str, list[LinearCall]]]:
    """Record every call of the layers inside.

    Args:
        linear: The linear layers that use a weight, by the weight's name.

    Yields:
        The calls so far, by the weight's name. Calls that need no gradient are left out.
    """
    calls: dict[str, list[LinearCall]] = {name: [] for name in linear}

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not output.requires_grad:
                return
            x = args[0] if args else kwargs["input"]
            calls[name].append(LinearCall(x.detach().reshape(-1, x.shape[-1]), get_gradient_edge(output)))

        return hook

    with temporary_hooks() as hooks:
        for name, layers in linear.items():
            for layer in dict.fromkeys(layers):  # before the user's own hooks, which may change the output
                hooks.append(layer.register_forward_hook(hook_for(name), with_kwargs=True, prepend=True))
        yield calls


def find_factorable(model: nn.Module, linear: Mapping[str, Sequence[nn.Module]], x: Nest) -> list[str]:
    """Find the weights whose gradient is the sum of δᵀX over their layers' calls, by comparison with autograd.

    This fails if a layer computes something else with its weight or in another precision, or if the model also uses the
    weight outside the layer. Layers with a forward of their own are not tried: what they do with these inputs in this
    mode says little about others (DropConnect in training).

    Args:
        model: The model, called once.
        linear: The linear layers that use a weight, by the weight's name.
        x: A few prepared inputs.

    Returns:
        The weights' names; none when fast paths are disabled.
    """
    weights = dict(model.named_parameters())
    linear = {name: layers for name, layers in linear.items() if all(map(may_factor, layers))}
    if not linear:
        return []
    with torch.enable_grad(), record_linear_calls(linear) as calls:
        output: Tensor = call_model(model, clone_nest(x))  # the model may work in place
        measure = output.logsumexp(-1).sum()
    calls = {name: made for name, made in calls.items() if any(call.rows for call in made)}  # no rows: no evidence
    edges = [call.output for made in calls.values() for call in made]
    wanted: list[Any] = [*(weights[name] for name in calls), *edges]
    if not wanted or not measure.requires_grad:
        return []
    gradients = torch.autograd.grad(measure, wanted, allow_unused=True)
    expected, slopes = gradients[: len(calls)], iter(gradients[len(calls) :])
    factorable = []
    for (name, made), slow in zip(calls.items(), expected, strict=True):
        own = [next(slopes) for _ in made]
        if {part.dtype for part in (*own, *(call.input for call in made)) if part is not None} != {weights[name].dtype}:
            continue  # mixed precision
        fast = outer_product(made, own, len(weights[name])).dense()
        if agree(fast, torch.zeros_like(fast) if slow is None else slow):
            factorable.append(name)
    return factorable


def may_factor(layer: nn.Module) -> bool:
    """Whether fast paths are enabled and calling the layer runs torch's own forward of linear layers."""
    return type(layer).forward is nn.Linear.forward and "forward" not in vars(layer) and fast_paths_enabled()


def outer_product(calls: Sequence[LinearCall], slopes: Sequence[Tensor | None], out_features: int) -> FactoredGrad:
    """Return a weight's gradient.

    Args:
        calls: The calls of its layers.
        slopes: The gradient of each call's output; None if the loss does not depend on it.
        out_features: The number of the weight's rows.
    """
    lefts = [
        call.input.new_zeros(call.rows, out_features) if slope is None else slope.reshape(call.rows, out_features)
        for call, slope in zip(calls, slopes, strict=True)
    ]
    if len(calls) == 1:
        return FactoredGrad(lefts[0], calls[0].input)
    return FactoredGrad(torch.cat(lefts), torch.cat([call.input for call in calls]))
