"""Which weights of a model a gradient memory covers, for any way to call the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from steppe.custom_loop.batches import Forward, copied
from steppe.errors import ModelError
from steppe.network.module_state import preserve_buffers
from steppe.projection.hooks import disable_fused_attention, find_weights_used_outside
from steppe.projection.layers import ProjectedWeight
from steppe.projection.misread_weights import find_misread_weights
from steppe.runtime.rng import preserve_global_rng
from steppe.tensors.nest import Nest

_MODEL = "model."  # the name of the user's model within `_OneBatch`


class _OneBatch(nn.Module):
    """The model called on one batch, whatever the argument: what the checks of coverage run.

    Args:
        model: The model.
        forward: Runs it on a batch.
        batch: The batch.
    """

    def __init__(self, model: nn.Module, forward: Forward, batch: Nest) -> None:
        super().__init__()
        self.model, self._forward, self._batch = model, forward, batch

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.reshape(-1).sin() for part in _float_tensors(self._forward(self.model, copied(self._batch)))]
        return torch.cat([part.to(parts[0]) for part in parts]) if parts else x.new_zeros(1)


def find_unprotectable(
    model: nn.Module, weights: Mapping[str, ProjectedWeight], forward: Forward, batch: Nest
) -> list[str]:
    """Find the weights that layers use in another way than their rule assumes.

    Args:
        model: The model, in eval mode.
        weights: The weights of layers with a rule, by parameter name.
        forward: Runs the model on a batch.
        batch: A batch.

    Returns:
        Their names.

    Raises:
        ModelError: A weight is also used outside its layer, so that only part of its gradient could be projected.
    """
    whole = _OneBatch(model, forward, batch)
    whole.training = False
    named = {_MODEL + name: replace(weight, name=_MODEL + name) for name, weight in weights.items()}
    nothing = torch.zeros(1)
    with preserve_global_rng(), preserve_buffers(model), torch.inference_mode(False):
        with disable_fused_attention(model):
            outside = find_weights_used_outside(whole, named, nothing)
        if outside:
            name = outside[0].removeprefix(_MODEL)
            raise ModelError(
                f"the weight {name!r} is used outside its layer, with inputs that a gradient memory cannot see: call "
                f"the layer, or leave the weight out with exclude=({name!r},)."
            )
        return [name.removeprefix(_MODEL) for name in find_misread_weights(whole, named, nothing)]


def _float_tensors(output: object) -> list[Tensor]:
    """The floating-point tensors in an output: a tensor, a nest of them, or an object with such attributes."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [tensor for part in output.values() for tensor in _float_tensors(part)]
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in _float_tensors(part)]
    attributes = vars(output).values() if hasattr(output, "__dict__") else ()
    return [value for value in attributes if isinstance(value, Tensor) and value.is_floating_point()]
