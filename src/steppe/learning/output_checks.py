"""What a model gives for its inputs, refused where it is nothing to learn with."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.errors import ModelError
from steppe.network.network import Network

_NO_GRADIENT = (
    "the model's output has no gradient in any weight, so that nothing can be learnt: leave detach(), no_grad(), NumPy "
    "and rounding out of its forward."
)


def check_gradient(output: Tensor, network: Network, x: Tensor) -> None:
    """Refuse a model whose output, in eval mode on stored samples x and in train mode, has no gradient."""
    if not output.requires_grad and not _has_gradient(network, x):
        raise ModelError(_NO_GRADIENT)


def _has_gradient(network: Network, x: Tensor) -> bool:
    """Whether the model's output on stored samples can be differentiated in train mode. Only a model whose output in
    eval mode cannot is looked at in this one, where a forward may leave traces.
    """
    before = network.snapshot()
    try:
        with torch.enable_grad(), network.mode(training=True):
            return bool(network.model(network.prepare_inputs(torch.cat([x, x]))).requires_grad)  # BatchNorm wants two
    finally:
        network.restore(before)


def no_logits(output: object, samples: int) -> str | None:
    """What a model gives instead of a row of logits for each sample; None where it gives just these."""
    if not isinstance(output, Tensor):
        return f"a {type(output).__name__}"
    if output.is_meta or output.layout != torch.strided:
        return "a tensor without values (on the device 'meta')" if output.is_meta else f"a {output.layout} tensor"
    if not output.is_floating_point():
        return f"{output.dtype} numbers instead of real ones"
    return None if output.ndim == 2 and len(output) == samples else str(tuple(output.shape))
