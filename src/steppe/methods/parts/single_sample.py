"""Single samples of which a method takes a gradient by themselves: a model's BatchNorm may want more than one."""

from __future__ import annotations

from steppe.errors import DataError, UsageError
from steppe.network.network import Network
from steppe.runtime.rng import preserve_global_rng
from steppe.tensors.batch import Batch


def is_batch_norm_size_error(error: ValueError) -> bool:
    """Whether an error is that of a norm layer which has one value to take the mean of."""
    return "more than 1 value per channel" in str(error)


def single_sample_error(name: str) -> DataError:
    """The error for a task one of whose batches is a single sample that the model cannot take by itself."""
    return DataError(
        f"{name}: a batch of one sample is too small for the model's BatchNorm: choose a batch_size that leaves no "
        "single sample at the end (with ascent_form=chunked, none in a chunk either)."
    )


def accepts_single_sample(network: Network, batch: Batch) -> bool:
    """Whether the model, in the mode it is in, can take a prepared batch of one sample."""
    try:
        with preserve_global_rng(network.device):
            network.loss_and_grad(batch, statistics=False)
    except ValueError as error:
        if not is_batch_norm_size_error(error):
            raise
        return False
    return True


def require_batchable(network: Network, batch: Batch, cause: str, remedy: str) -> None:
    """Refuse a prepared batch of one sample that the model, in the mode it is in, cannot take by itself. To be asked
    before anything is learnt that would be lost; larger batches are not looked at.
    """
    if len(batch) == 1 and not accepts_single_sample(network, batch):
        raise UsageError(f"{cause}, which is too few for the model's BatchNorm: {remedy}.")
