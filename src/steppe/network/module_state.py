"""A model's weights and buffers as a state: what is kept of them, and how a model becomes what they tell.

Some buffers a model makes by itself: those that are not persistent, and those that were empty until a forward filled
them. They are kept like all others, because learning may go through them and is to go on to the same bits; but as a
fresh model may not have them yet, or of another size, nothing is refused on their account.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from steppe.errors import ModelError
from steppe.fast.factored import ParamDict


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All weights and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_learnable(name: str, weight: nn.Parameter) -> None:
    """Refuse a weight that cannot be learnt, whatever the others are."""
    if weight.is_complex():
        raise ModelError(
            f"the weight {name!r} is {weight.dtype}, and methods work with real numbers: keep its real and imaginary "
            "parts as a real weight (torch.view_as_real), or freeze it (requires_grad_(False))."
        )
    if weight.is_inference():
        raise ModelError(
            f"the weight {name!r} was made under torch.inference_mode, where nothing can be learnt: make the model "
            "outside of it."
        )


def empty_buffers(model: nn.Module) -> frozenset[str]:
    """The buffers that have a name and no value yet."""
    return frozenset(name for name, module, own in _places(model) if module._buffers[own] is None)


def non_persistent_buffers(model: nn.Module) -> frozenset[str]:
    """The buffers that are not persistent."""
    return frozenset(name for name, module, own in _places(model) if own in module._non_persistent_buffers_set)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every buffer, filled or not: its name, the module that holds it, and its name there."""
    for path, module in model.named_modules():
        for own in module._buffers:
            yield (f"{path}.{own}" if path else own), module, own


@torch.no_grad()
def put_back(model: nn.Module, kept: Mapping[str, Tensor], self_made: Collection[str]) -> None:
    """Weights and buffers as they were; buffers that the model has made by itself since stay."""
    for name, tensor in tensors_of(model).items():
        if name not in self_made or (name in kept and _alike(kept[name], tensor)):
            tensor.copy_(kept[name])


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def load_tensors(model: nn.Module, saved: Mapping[str, Tensor], self_made: Collection[str]) -> None:
    """Take the saved tensors; other names or shapes are refused, but for buffers that are `self_made` in what was saved
    or not persistent in the model: empty ones are filled, and what has no place, or another shape, is left out.
    """
    mine, passing = tensors_of(model), non_persistent_buffers(model)
    lenient = passing | frozenset(self_made)
    for name in sorted(mine.keys() | saved.keys()):
        if name in mine and name in saved:
            if not _alike(mine[name], saved[name]) and name not in passing:
                raise ModelError(
                    f"{name!r} is {mine[name].dtype} of shape {tuple(mine[name].shape)} in the model, and "
                    f"{saved[name].dtype} of shape {tuple(saved[name].shape)} in what was saved: give the same model."
                )
        elif name not in (passing if name in mine else lenient):
            where = "the model but not in what was saved" if name in mine else "what was saved but not in the model"
            raise ModelError(f"{name!r} is in {where}: give the model that was saved.")
        elif name in saved and not isinstance(saved[name], Tensor):
            raise ValueError(f"the buffer {name!r} is no tensor")
    for name, module, own in list(_places(model)):
        if name in saved and name in lenient and module._buffers[own] is None:
            module._buffers[own] = saved[name].detach().clone()
    put_back(model, saved, lenient)


def undoing(model: nn.Module) -> Callable[[], None]:
    """What makes weights and buffers again what they are now, whatever `load_tensors` has done."""
    kept = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    empty = empty_buffers(model)

    def undo() -> None:
        for name, module, own in list(_places(model)):
            if name in empty:
                module._buffers[own] = None
        put_back(model, kept, ())

    return undo


@contextmanager
def swap_parameters(parameters: Mapping[str, nn.Parameter], weights: ParamDict | None) -> Iterator[None]:
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
def preserve_buffers(model: nn.Module) -> Iterator[None]:
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
