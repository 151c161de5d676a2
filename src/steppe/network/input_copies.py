"""Protects inputs from models whose forward changes them in place: those get copies, all others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import ModelError
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, clone_nest, leaves


class InputCopies:
    """Calls a model so that its input stays unchanged.

    The first forward in each mode gets a copy, which shows whether the model works in place. If it does, all later
    ones in that mode get copies too. If not, they get the input itself, and checking its version counter afterwards is
    the only cost. Each mode is checked by itself, because `nn.Dropout(inplace=True)` works in place in train mode only.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._needed: dict[bool, bool] = {}  # by `training`

    def forget(self) -> None:
        """Check the next forward in each mode again, in case the model was changed."""
        self._needed.clear()

    def call(self, x: Nest, forward: Callable[..., Any] | None = None) -> Tensor:
        """Return the model's output for inputs; `forward` replaces the model, see `call_model`."""
        forward = forward or self._model
        training = self._model.training
        needed = self._needed.get(training)
        if needed:
            return call_model(forward, clone_nest(x))
        if needed is None:
            copy = clone_nest(x)
            output = call_model(forward, copy)
            pairs = zip(leaves(copy), leaves(x), strict=True)
            self._needed[training] = any(_changed(one, other) for one, other in pairs)
            return output
        versions = _versions(x)
        output = call_model(forward, x)
        if _versions(x) != versions:
            self._needed[training] = True
            raise ModelError(
                "the model changed its input in place, but did not in its first forward; this batch is overwritten. "
                "Start its forward with a copy (x = x.clone()), or set inplace=False in the layers that work in place."
            )
        return output


def _versions(x: Nest) -> list[int]:
    """The version counters of the inputs; inference tensors have none."""
    return [leaf._version for leaf in leaves(x) if not leaf.is_inference()]


def _changed(copy: Tensor, original: Tensor) -> bool:
    """Whether a forward pass has changed its copy, through torch or behind its back (through a NumPy view).

    The latter is possible on the CPU only. On other devices comparing would wait for the device, so only inference
    tensors, which have no version counter, are compared there.

    Args:
        copy: The copy that the forward pass was given.
        original: The original.

    Returns:
        True if it has.
    """
    counts = not copy.is_inference()
    if counts and copy._version > 0:
        return True
    return (copy.is_cpu or not counts) and not torch.equal(copy, original)
