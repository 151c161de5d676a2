"""Batch sizes that a model accepts in eval mode.

A BatchNorm without running statistics normalizes by those of the batch, and a single sample has none.
"""

from __future__ import annotations

from torch import nn

from steppe.errors import DataError


def min_eval_batch(model: nn.Module) -> int:
    """Return the fewest samples that the model accepts at once in eval mode: 1, or 2."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return 2 if any(norm.running_mean is None for norm in norms) else 1


def eval_batch_size(model: nn.Module, count: int | None, largest: int) -> int:
    """Choose the batch size for running samples through the model in eval mode.

    Args:
        model: The model.
        count: How many samples there are; None if that is not known.
        largest: The batch size to use if possible.

    Returns:
        A size that leaves no single sample over at the end, if the model rejects those.

    Raises:
        DataError: There is one sample, and the model needs two.
    """
    if count is None or min_eval_batch(model) == 1:
        return largest
    if count == 1:
        raise DataError(
            "a single sample cannot be normalized, because a BatchNorm of the model keeps no running statistics; pass "
            "at least two samples, or set track_running_stats=True."
        )
    return next((size for size in range(largest, 1, -1) if count % size != 1), count)
