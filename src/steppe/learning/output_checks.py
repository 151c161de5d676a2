"""Checks on what a model returns, logits or an output for the user's own loss, and on what that loss returns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from steppe.data.task import Task
from steppe.errors import ModelError, UsageError
from steppe.network.heads import is_class_numbers, within_head
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


def check_output(output: object, samples: int, network: Network) -> None:
    """Raise ModelError if a model's output, for so many samples, is not what the loss takes."""
    if (problem := describe_if_unusable(output, samples, network)) is not None:
        raise ModelError(f"{expected_output(network)}, got {problem}.")


def expected_output(network: Network) -> str:
    """Say what the model must return."""
    if network.output_loss.is_cross_entropy:
        return "the model must return one row of logits per sample, (n, outputs)"
    return "the model must return a tensor whose first dimension counts the samples, (n, ...)"


def describe_if_unusable(output: object, samples: int, network: Network) -> str | None:
    """Describe what a model returns, for so many samples, if the loss cannot take it; None if it can."""
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} without 'logits' (it has {', '.join(map(repr, output))})"
    if not isinstance(output, Tensor):
        return f"a {type(output).__name__}"
    if output.is_meta or output.layout != torch.strided:
        return "a tensor without values (on the device 'meta')" if output.is_meta else f"a {output.layout} tensor"
    if not output.is_floating_point():
        return f"{output.dtype} instead of floating point"
    fits = output.ndim == 2 if network.output_loss.is_cross_entropy else output.ndim > 0
    return None if fits and len(output) == samples else str(tuple(output.shape))


def count_outputs(output: Tensor) -> int:
    """Return how many columns heads may choose from: 0 if the output is not one row per sample."""
    return output.shape[1] if output.ndim == 2 else 0


def check_head_possible(task: Task, output: Tensor) -> None:
    """Raise UsageError for a head of a model whose output has no columns to choose from."""
    if task.head is not None and output.ndim != 2:
        raise UsageError(
            f"{task.name}: head={task.head} chooses columns of one row per sample, (n, outputs), but the model's "
            f"output has shape {tuple(output.shape)}; leave out the head."
        )


def check_targets(task: Task, target: Tensor, outputs: int, network: Network) -> None:
    """Raise DataError, to be prefixed by `task.error_context`, for class numbers outside the task's head.

    With a loss of the user's any target is allowed, but class numbers must fit a head that is given, as they are
    counted from its first column; negative ones stand for ignored samples.
    """
    if network.output_loss.is_cross_entropy:
        task.check_labels(target, outputs)
    elif task.head is not None and is_class_numbers(target):
        task.check_labels(target[target >= 0], outputs)


def check_loss(task: Task, output: Tensor, target: Tensor, network: Network) -> None:
    """Call the user's loss once, before anything is changed; raise UsageError if it cannot be learned from.

    Args:
        task: The task.
        output: The model's output on some of its samples.
        target: Their targets.
        network: The network.
    """
    if network.output_loss.is_cross_entropy:
        return
    with torch.enable_grad():
        output, target = within_head(output, network.inputs.prepare_targets(target), task.head)
        network.output_loss.call(output, target)
