"""Record what linear layers take in and give out during a forward, so that their gradients can be had as factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from steppe.fast.factored import FactoredGrad


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One call: its input vectors, (rows, in), and the place of its output in the graph.

    The place is taken at once, so an operation that later overwrites the output (ReLU in place) does not disturb it.
    """

    input: Tensor
    output: GradientEdge

    @property
    def rows(self) -> int:
        """How many input vectors there were."""
        return self.input.shape[0]


@contextmanager
def record_linear_calls(linear: Mapping[str, Sequence[nn.Module]]) -> Iterator[dict[str, list[LinearCall]]]:
    """Inside, every call of the layers is recorded under the name of their weight."""
    calls: dict[str, list[LinearCall]] = {name: [] for name in linear}

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not output.requires_grad:  # called where no gradient is wanted
                return
            x = args[0] if args else kwargs["input"]
            calls[name].append(LinearCall(x.detach().reshape(-1, x.shape[-1]), get_gradient_edge(output)))

        return hook

    handles = []
    try:
        for name, layers in linear.items():
            for layer in dict.fromkeys(layers):  # before hooks of the user's own, which may change the output
                handles.append(layer.register_forward_hook(hook_for(name), with_kwargs=True, prepend=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def factorable(model: nn.Module, linear: Mapping[str, Sequence[nn.Module]], x: Tensor) -> list[str]:
    """The weights whose gradient really is the sum of their layers' outer products.

    Not so where a layer computes something else with its weight, or in another precision, or the model uses the weight
    elsewhere too; seen by comparison with autograd on a few prepared inputs. A layer with a forward of its own is not
    tried at all: what it does to these inputs, in this mode, says little about others (DropConnect in training).
    """
    weights = dict(model.named_parameters())
    linear = {name: layers for name, layers in linear.items() if all(map(is_plain, layers))}
    with torch.enable_grad(), record_linear_calls(linear) as calls:
        output: Tensor = model(x.clone())  # it may work in place
        measure = output.logsumexp(-1).sum()
    seen = {name: made for name, made in calls.items() if any(call.rows for call in made)}  # no inputs tell nothing
    edges = [call.output for made in seen.values() for call in made]
    wanted: list[Any] = [*(weights[name] for name in seen), *edges]
    if not wanted or not measure.requires_grad:
        return []
    found = torch.autograd.grad(measure, wanted, allow_unused=True)
    truths, slopes = found[: len(seen)], iter(found[len(seen) :])
    true = []
    for (name, made), truth in zip(seen.items(), truths, strict=True):
        own = [next(slopes) for _ in made]
        if {part.dtype for part in (*own, *(call.input for call in made)) if part is not None} != {weights[name].dtype}:
            continue  # mixed precision
        product = outer_product(made, own, len(weights[name])).dense()
        expected = torch.zeros_like(product) if truth is None else truth
        if not bool(expected.isfinite().all()):  # the first update says so
            continue
        if torch.allclose(product, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max() + 1)):
            true.append(name)
    return true


def is_plain(layer: nn.Module) -> bool:
    """Whether calling it runs torch's own forward of linear layers."""
    return type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)


def outer_product(calls: Sequence[LinearCall], slopes: Sequence[Tensor | None], outputs: int) -> FactoredGrad:
    """The weight's gradient from the gradients of the calls' outputs; an output the loss did not use has none."""
    lefts = [
        call.input.new_zeros(call.rows, outputs) if slope is None else slope.reshape(call.rows, outputs)
        for call, slope in zip(calls, slopes, strict=True)
    ]
    if len(calls) == 1:
        return FactoredGrad(lefts[0], calls[0].input)
    return FactoredGrad(torch.cat(lefts), torch.cat([call.input for call in calls]))
