"""What a model is for a while, and no longer afterwards: with other weights, with its buffers kept, in another mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from steppe.types import Direction


@contextmanager
def standing_at(parameters: Mapping[str, nn.Parameter], weights: Direction | None) -> Iterator[None]:
    """Other tensors take the place of the parameters' own, which are put back untouched."""
    if weights is None:
        yield
        return
    own = {name: parameters[name].data for name in weights}
    try:
        for name, tensor in weights.items():
            parameters[name].data = tensor
        yield
    finally:
        try:
            _set_data(parameters, own)
        except BaseException:  # from outside: it has split the first attempt
            _set_data(parameters, own)
            raise


def _set_data(parameters: Mapping[str, nn.Parameter], data: Mapping[str, Tensor]) -> None:
    for name, tensor in data.items():
        parameters[name].data = tensor


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Whatever forwards do to buffers inside is undone: changing one, or putting another in its place."""
    kept = [(module, name, buffer, buffer.clone()) for module, name, buffer in buffers_of(model)]
    try:
        yield
    finally:
        try:
            _set_buffers(kept)
        except BaseException:
            _set_buffers(kept)
            raise


@torch.no_grad()
def _set_buffers(kept: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    for module, name, buffer, value in kept:
        setattr(module, name, buffer.copy_(value))


@contextmanager
def buffers_apart(model: nn.Module) -> Iterator[None]:
    """Forwards inside change copies of the buffers, whose values the buffers themselves take on afterwards. A graph
    keeps the copies that its forward used, so further forwards may change the buffers before it is differentiated.
    """
    own = buffers_of(model)
    copies = {id(buffer): buffer.clone() for _, _, buffer in own}  # modules that share one go on sharing it
    for module, name, buffer in own:
        setattr(module, name, copies[id(buffer)])
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer in own:
                setattr(module, name, buffer.copy_(getattr(module, name)))


@contextmanager
def in_mode(model: nn.Module, training: bool, resting: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Train or eval mode inside, but for those at rest, which are in eval mode; afterwards every module is in the mode
    it was found in. Parts that their owner put in eval mode and has frozen stay in it.
    """
    found = [(module, module.training) for module in model.modules()]
    frozen = [module for module, was in found if not was and is_frozen(module)]
    try:
        model.train(training)
        for module in [*resting, *frozen]:
            module.eval()
        yield
    finally:
        try:
            _set_modes(found)
        except BaseException:
            _set_modes(found)
            raise


def _set_modes(found: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in found:
        module.training = training


def is_frozen(module: nn.Module) -> bool:
    """Whether a part has weights, and none of them is to be learnt."""
    weights = list(module.parameters())
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every buffer with the module that holds it and its name there."""
    return [(module, name, each) for module in model.modules() for name, each in module.named_buffers(recurse=False)]
