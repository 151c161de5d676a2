"""A model's weights and buffers: reading, restoring and loading them, and its modules' modes.

Lazy buffers are those that the model creates by itself: not persistent, or empty until a forward fills them. They are
saved like all others, because resumed learning must give the same bits. But a fresh model may not have them yet, or in
another size, so they are not required to match.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from steppe.errors import ModelError
from steppe.fast.factored import ParamDict


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def empty_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of buffers that have no value yet."""
    return frozenset(name for name, module, own in _places(model) if module._buffers[own] is None)


def non_persistent_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of buffers that are not persistent."""
    return frozenset(name for name, module, own in _places(model) if own in module._non_persistent_buffers_set)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield every buffer, filled or not: its full name, its module, and its name there."""
    for path, module in model.named_modules():
        for own in module._buffers:
            yield (f"{path}.{own}" if path else own), module, own


@torch.no_grad()
def restore_tensors(model: nn.Module, saved: Mapping[str, Tensor], lazy: Collection[str]) -> None:
    """Copy saved weights and buffers into the model; lazy buffers that do not match stay as they are.

    All are copied in a single call, so that an interrupt leaves either the old ones or the saved ones.
    """
    pairs = [
        (tensor, saved[name])
        for name, tensor in tensors_of(model).items()
        if name not in lazy or (name in saved and _same_kind(saved[name], tensor))
    ]
    if pairs:
        torch._foreach_copy_([tensor for tensor, _ in pairs], [value for _, value in pairs])


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def load_tensors(model: nn.Module, saved: Mapping[str, Tensor], lazy: Collection[str]) -> None:
    """Load saved weights and buffers into a model.

    Args:
        model: The model.
        saved: Weights and buffers by name.
        lazy: Which of the saved buffers were lazy. These, and those that are not persistent in the model, need not
            match: empty ones are filled, and what has no place or another shape is skipped.

    Raises:
        ModelError: Names or shapes differ.
        ValueError: Something saved is not a tensor.
    """
    own, passing = tensors_of(model), non_persistent_buffers(model)
    lenient = passing | frozenset(lazy)
    for name in sorted(own.keys() | saved.keys()):
        if name in own and name in saved:
            if not _same_kind(own[name], saved[name]) and name not in passing:
                raise ModelError(
                    f"{name!r} is {own[name].dtype} of shape {tuple(own[name].shape)} in the model, but "
                    f"{saved[name].dtype} of shape {tuple(saved[name].shape)} in the saved state; pass the same model."
                )
        elif name not in (passing if name in own else lenient):
            where = "the model but not in the saved state" if name in own else "the saved state but not in the model"
            raise ModelError(f"{name!r} is in {where}; pass the model that was saved.")
        elif name in saved and not isinstance(saved[name], Tensor):
            raise ValueError(f"the buffer {name!r} is not a tensor")
    for name, module, key in list(_places(model)):
        if name in saved and name in lenient and module._buffers[key] is None:
            module._buffers[key] = saved[name].detach().clone()
    restore_tensors(model, saved, lenient)


def undoing(model: nn.Module) -> Callable[[], None]:
    """Return a function that sets weights and buffers back to what they are now, after a failed `load_tensors`."""
    saved = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    empty = empty_buffers(model)

    def undo() -> None:
        for name, module, key in list(_places(model)):
            if name in empty:
                module._buffers[key] = None
        restore_tensors(model, saved, ())

    return undo


@contextmanager
def swap_parameters(parameters: Mapping[str, nn.Parameter], weights: ParamDict | None) -> Iterator[None]:
    """Use other tensors in place of the parameters' own inside; theirs are put back unchanged."""
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
        except BaseException:  # raised from another thread, in the middle of the first attempt
            _set_data(parameters, own)
            raise


def _set_data(parameters: Mapping[str, nn.Parameter], data: Mapping[str, Tensor]) -> None:
    for name, tensor in data.items():
        parameters[name].data = tensor


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Undo what forwards inside do to buffers, whether they change one or replace it."""
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
    if kept:
        torch._foreach_copy_([buffer for _, _, buffer, _ in kept], [value for *_, value in kept])
    for module, name, buffer, _ in kept:
        setattr(module, name, buffer)


@contextmanager
def buffers_apart(model: nn.Module) -> Iterator[None]:
    """Let forwards inside change copies of the buffers; afterwards the buffers take on the copies' values.

    The autograd graph keeps the copies that its forward used, so later forwards may change the buffers before the
    backward pass.
    """
    own = buffers_of(model)
    copies = {id(buffer): buffer.clone() for _, _, buffer in own}  # modules that share a buffer share its copy
    moved: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    try:
        for module, name, buffer in own:
            setattr(module, name, copies[id(buffer)])
        yield
    finally:
        try:
            moved = [(module, name, buffer, getattr(module, name)) for module, name, buffer in own]
            _set_buffers(moved)
        except BaseException:  # raised from another thread, in the middle of the first attempt
            _set_buffers(moved or [(module, name, buffer, buffer) for module, name, buffer in own])
            raise


@contextmanager
def in_mode(model: nn.Module, training: bool, always_eval: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put the model in train or eval mode inside; afterwards each module has its own mode again.

    Args:
        model: The model. Frozen parts that are in eval mode stay in it.
        training: Train mode, or eval mode.
        always_eval: Modules to keep in eval mode.
    """
    before = [(module, module.training) for module in model.modules()]
    frozen = [module for module, was_training in before if not was_training and is_frozen(module)]
    try:
        model.train(training)
        for module in [*always_eval, *frozen]:
            module.eval()
        yield
    finally:
        try:
            _set_modes(before)
        except BaseException:
            _set_modes(before)
            raise


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def is_frozen(module: nn.Module) -> bool:
    """Whether a part of a model has weights, and none of them is trainable."""
    weights = list(module.parameters())
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return every buffer with its module and its name there."""
    return [(module, name, each) for module in model.modules() for name, each in module.named_buffers(recurse=False)]
