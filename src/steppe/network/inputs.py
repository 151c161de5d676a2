"""From stored samples to the model's inputs: moved to its device, padded, transformed, in its dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steppe.data.padding import NO_PADDING, Padding
from steppe.data.transforms import UnitRange
from steppe.errors import DataError, UsageError
from steppe.runtime.devices import to_device
from steppe.tensors.batch import Batch
from steppe.tensors.nest import Nest, leaves, map_nest, nest_to_device
from steppe.tensors.ragged import Ragged


class InputPipeline:
    """Pads sequences and applies the learner's `input_transform`; without one, bytes are scaled to 0…1 and other
    numbers kept.

    Attributes:
        padding: How sequences are padded; None if there are none.
    """

    def __init__(
        self,
        input_transform: Callable[[Any], Any] | None,
        device: torch.device,
        dtype: torch.dtype,
        padding: Padding | None = None,
    ) -> None:
        self._transform = input_transform or UnitRange()
        self._device, self._dtype, self.padding = device, dtype, padding

    @property
    def is_elementwise(self) -> bool:
        """Whether the transform is known to treat all elements of a sample alike, so that their order is irrelevant."""
        return bool(getattr(self._transform, "elementwise", False))

    @property
    def scales_bytes(self) -> bool:
        """Whether this is the default transform: bytes are scaled, other numbers kept."""
        return isinstance(self._transform, UnitRange)

    def as_stored(self, x: Nest) -> Nest:
        """Return samples as buffers keep them: sequences without padding.

        Raises:
            DataError: There are sequences of different lengths, and nothing says how to pad them.
        """
        if self.padding is not None:
            return self.padding.as_stored(x)
        if not isinstance(x, Tensor) and any(isinstance(leaf, Ragged) for leaf in leaves(x)):
            raise DataError(NO_PADDING)
        return x

    def prepare_inputs(self, x: Nest) -> Nest:
        """Return stored samples as the model's inputs."""
        if isinstance(x, Tensor) and self.padding is None:
            return self._in_own_type(self._transform(to_device(x, self._device)))
        x = nest_to_device(x, self._device)
        if self.padding is not None:
            x = self.padding.padded(self.padding.as_stored(x))
        whole = isinstance(x, Tensor) or not self.scales_bytes
        x = self._transform(x) if whole else map_nest(self._transform, x)
        return self._in_own_type(x)

    def _in_own_type(self, prepared: Any) -> Any:
        """Numbers in the type of the model's weights."""
        if isinstance(prepared, Tensor):
            return prepared.to(self._dtype) if prepared.is_floating_point() else prepared
        return map_nest(self._leaf_in_own_type, prepared)

    def _leaf_in_own_type(self, leaf: object) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise UsageError(
                "`input_transform` must return a tensor, or a dictionary or tuple of tensors, got "
                f"{type(leaf).__name__}."
            )
        return leaf.to(self._dtype) if leaf.is_floating_point() else leaf

    def prepare_targets(self, y: Any) -> Tensor:
        """Return targets on the model's device; sequences are padded.

        Raises:
            DataError: There are sequences of different lengths, and nothing says how to pad them.
        """
        if isinstance(y, Tensor):
            return to_device(y, self._device)
        if self.padding is None:
            raise DataError(NO_PADDING)
        return self.padding.pad_targets(nest_to_device(y, self._device))

    def prepare(self, batch: Batch) -> Batch:
        """Return a stored batch as the model's input."""
        return Batch(self.prepare_inputs(batch.x), self.prepare_targets(batch.y), to_device(batch.task, self._device))
