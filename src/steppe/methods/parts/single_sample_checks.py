"""Checks for batches of one sample, which BatchNorm cannot normalize by their own statistics."""

from __future__ import annotations

from steppe.errors import DataError, UsageError
from steppe.network.network import Network
from steppe.runtime.rng import preserve_global_rng
from steppe.tensors.batch import Batch


def is_batch_norm_size_error(error: ValueError) -> bool:
    """Whether a norm layer raised the error because it got a single value per channel."""
    return "more than 1 value per channel" in str(error)


def single_sample_error(name: str) -> DataError:
    """The error for a task with a batch of one sample that the model's BatchNorm cannot normalize."""
    return DataError(
        f"{name}: a batch of one sample is too small for the model's BatchNorm: choose a batch_size that leaves no "
        "single sample in the last batch (with ascent_form=chunked, nor in a chunk)."
    )


def accepts_single_sample(network: Network, batch: Batch) -> bool:
    """Whether the model in its current mode accepts a prepared batch of one sample."""
    try:
        with preserve_global_rng(network.device):
            network.loss_and_grad(batch, statistics=False)
    except ValueError as error:
        if not is_batch_norm_size_error(error):
            raise
        return False
    return True


def require_batchable(network: Network, batch: Batch, cause: str, remedy: str) -> None:
    """Reject a batch of one sample that BatchNorm cannot normalize. Call it before a task changes anything.

    Args:
        network: The network, in the mode in which it will see the batch.
        batch: The prepared batch; anything but a single sample is accepted without a check.
        cause: Why there is a single sample, as the start of the error text.
        remedy: What to do, as the end of the error text.

    Raises:
        UsageError: If the model cannot process the sample alone.
    """
    if len(batch) == 1 and not accepts_single_sample(network, batch):
        raise UsageError(f"{cause}, too few for the model's BatchNorm: {remedy}.")
