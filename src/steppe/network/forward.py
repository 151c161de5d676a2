"""Calls the model in train or eval mode and in the current precision, without changing its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, autocast, nn

from steppe.fast.matmul import fast_linear_layers, wide_linear_layers
from steppe.network.input_copies import InputCopies
from steppe.network.module_state import in_mode
from steppe.network.weights import Weights
from steppe.tensors.nest import Nest


class Forward:
    """The model's forward pass.

    Attributes:
        input_copies: Protects inputs from models that change them in place.
        is_mixed: Whether the model currently runs in bfloat16.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._model, self._weights = model, weights
        self.find_wide_layers()
        self.input_copies = InputCopies(model)
        self.is_mixed = False

    def find_wide_layers(self) -> None:
        """Find the layers that are computed in another way because of their size."""
        self._wide = wide_linear_layers(self._model)

    def __call__(self, x: Nest, call: Callable[..., Any] | None = None) -> Tensor:
        """Return the model's output on prepared inputs; `call` replaces the model, see `call_model`."""
        if not self.is_mixed:
            with fast_linear_layers(self._wide):
                return self.input_copies.call(x, call)
        with autocast(self._weights.device.type, torch.bfloat16):
            output = self.input_copies.call(x, call)
        return output.float() if output.dtype == torch.bfloat16 else output

    @contextmanager
    def autocast_to(self, precision: str) -> Iterator[None]:
        """Run the model in this precision inside, in train mode only; its weights stay as they are."""
        before, self.is_mixed = self.is_mixed, precision == "bfloat16"
        try:
            yield
        finally:
            self.is_mixed = before

    @contextmanager
    def mode(self, *, training: bool) -> Iterator[None]:
        """Put the model in train or eval mode inside; afterwards each module has its own mode again.

        Frozen parts that their owner put in eval mode stay in it. In eval mode the model runs in its own precision.
        """
        before, self.is_mixed = self.is_mixed, self.is_mixed and training
        try:
            with in_mode(self._model, training, self._weights.frozen_statistics):
                yield
        finally:
            self.is_mixed = before
