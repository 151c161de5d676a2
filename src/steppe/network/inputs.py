"""From stored samples to the model's inputs: moved to its device, transformed, in its dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from steppe.data.transforms import UnitRange
from steppe.errors import UsageError
from steppe.runtime.devices import to_device
from steppe.tensors.batch import Batch


class InputPipeline:
    """Applies the learner's `input_transform`; without one, bytes are scaled to 0…1 and other numbers kept."""

    def __init__(
        self, input_transform: Callable[[Tensor], Tensor] | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._transform = input_transform or UnitRange()
        self._device, self._dtype = device, dtype

    @property
    def is_elementwise(self) -> bool:
        """Whether the transform is known to treat all elements of a sample alike, so that their order is irrelevant."""
        return bool(getattr(self._transform, "elementwise", False))

    @property
    def scales_bytes(self) -> bool:
        """Whether this is the default transform: bytes are scaled, other numbers kept."""
        return isinstance(self._transform, UnitRange)

    def prepare_inputs(self, x: Tensor) -> Tensor:
        """Return stored samples as the model's inputs."""
        x = self._transform(to_device(x, self._device))
        if not isinstance(x, Tensor):
            raise UsageError(f"`input_transform` must return a tensor, got {type(x).__name__}.")
        return x.to(self._dtype) if x.is_floating_point() else x

    def prepare(self, batch: Batch) -> Batch:
        """Return a stored batch as the model's input."""
        device = self._device
        return Batch(self.prepare_inputs(batch.x), to_device(batch.y, device), to_device(batch.task, device))
