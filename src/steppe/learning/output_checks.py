"""Checks on what a model returns: logits with a gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from steppe.errors import ModelError
from steppe.network.network import Network
from steppe.tensors.model_call import call_model
from steppe.tensors.nest import Nest, concat_nests

_NO_GRADIENT = (
    "the model's output has no gradient in any weight, so it cannot be trained; remove detach(), no_grad(), NumPy and "
    "rounding from its forward."
)


def check_gradient(output: Tensor, network: Network, x: Nest) -> None:
    """Raise ModelError if the output, in eval mode on stored samples x and in train mode too, has no gradient."""
    if not output.requires_grad and not _has_gradient(network, x):
        raise ModelError(_NO_GRADIENT)


def _has_gradient(network: Network, x: Nest) -> bool:
    """Whether the output on stored samples has a gradient in train mode, where a forward may change the model."""
    before = network.snapshot()
    try:
        with torch.enable_grad(), network.mode(training=True):
            twice = network.prepare_inputs(concat_nests([x, x]))  # BatchNorm needs two
            return bool(call_model(network.model, twice).requires_grad)
    finally:
        network.restore(before)


def describe_if_not_logits(output: object, samples: int) -> str | None:
    """Describe what a model returns instead of a row of logits for each sample; None if it returns these."""
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} without 'logits' (it has {', '.join(map(repr, output))})"
    if not isinstance(output, Tensor):
        return f"a {type(output).__name__}"
    if output.is_meta or output.layout != torch.strided:
        return "a tensor without values (on the device 'meta')" if output.is_meta else f"a {output.layout} tensor"
    if not output.is_floating_point():
        return f"{output.dtype} instead of floating point"
    return None if output.ndim == 2 and len(output) == samples else str(tuple(output.shape))
