"""Collect layer inputs during a forward: hooks that live for the length of a `with` block and not a line longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steppe.projection.layers import CoveredWeight

Sink = Callable[[str, Tensor], None]
CallSink = Callable[[CoveredWeight, nn.Module, Tensor], None]


def captured_inputs(weights: Mapping[str, CoveredWeight], sink: Sink) -> AbstractContextManager[None]:
    """Inside, every forward hands each covered layer's input columns, (groups, n, in), to `sink(name, columns)`."""
    return captured_calls(weights, lambda weight, layer, x: sink(weight.name, weight.rule(layer, x)))


@contextmanager
def captured_calls(weights: Mapping[str, CoveredWeight], sink: CallSink) -> Iterator[None]:
    """Inside, every forward hands each call of a covered layer, the input as it is, to `sink(weight, layer, x)`."""
    handles = []

    def hook_for(weight: CoveredWeight) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            sink(weight, layer, x.detach())

        return hook

    try:
        for weight in weights.values():
            for layer in dict.fromkeys(weight.layers):
                handles.append(layer.register_forward_pre_hook(hook_for(weight), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def output_weight(model: nn.Module, weights: Mapping[str, CoveredWeight], x: Tensor) -> str | None:
    """The covered weight whose layer gives the model's output, found by one forward; None if there is no such one.

    A layer that returns the very tensor the model returns is it; otherwise the last layer run, if its output has
    the same shape (a scale may follow it).
    """
    calls: list[tuple[str, Tensor]] = []
    handles = []

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        return lambda layer, args, output: calls.append((name, output))

    try:
        for name, weight in weights.items():
            for layer in dict.fromkeys(weight.layers):
                handles.append(layer.register_forward_hook(hook_for(name)))
        with torch.no_grad():
            result = model(x)
    finally:
        for handle in handles:
            handle.remove()
    for name, output in calls:
        if output is result:
            return name
    if calls and calls[-1][1].shape == result.shape:
        return calls[-1][0]
    return None
