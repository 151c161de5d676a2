"""Models whose forward changes its input in place: they are given copies, and all others are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from steppe.errors import ModelError


class InputCopies:
    """Calls a model so that its input stays what it was.

    The first forward in each mode gets a copy, which shows whether the model works on its input. If it does, all later
    ones in that mode get copies too; if not, they get the input itself, and looking at its version afterwards is all
    that it costs. A model may work in place in train mode alone, as `nn.Dropout(inplace=True)` does, so that one mode
    tells nothing of the other.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._needed: dict[bool, bool] = {}  # by mode: whether it is training

    def forget(self) -> None:
        """Look anew at the next forward in each mode: the model may have been changed."""
        self._needed.clear()

    def call(self, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """What the model gives for the input, or what another way of calling it gives."""
        forward = forward or self._model
        training = self._model.training
        needed = self._needed.get(training)
        if needed:
            return forward(x.clone())
        if needed is None:
            copy = x.clone()
            output = forward(copy)
            self._needed[training] = _changed(copy, x)
            return output
        if x.is_inference():  # such tensors count no versions
            return forward(x)
        version = x._version
        output = forward(x)
        if x._version != version:
            self._needed[training] = True
            raise ModelError(
                "the model changes its input in place, but did not in its first forward: this batch is spoilt. Let its "
                "forward begin with a copy (x = x.clone()), or set inplace=False in the layers that work in place."
            )
        return output


def _changed(copy: Tensor, original: Tensor) -> bool:
    """Whether a forward has changed the copy that it was given, by torch or behind its back (a NumPy view), which is
    possible on the CPU alone: elsewhere comparing them would wait for the device, and only inference tensors need it.
    """
    counts = not copy.is_inference()
    if counts and copy._version > 0:
        return True
    return (copy.is_cpu or not counts) and not torch.equal(copy, original)
