"""Single samples of which a method takes a gradient by themselves: a model's BatchNorm may want more than one."""

from __future__ import annotations

from steppe.errors import UsageError
from steppe.network import Network
from steppe.seeding import borrowed_global_generator
from steppe.types import Batch


def too_few_for_norm(error: ValueError) -> bool:
    """Whether an error is that of a norm layer which has one value to take the mean of."""
    return "more than 1 value per channel" in str(error)


def check_alone(network: Network, batch: Batch, cause: str, remedy: str) -> None:
    """Refuse a prepared batch of one sample that the model, in the mode it is in, cannot take by itself. To be asked
    before anything is learnt that would be lost; larger batches are not looked at.
    """
    if len(batch) != 1:
        return
    try:
        with borrowed_global_generator():
            network.gradient(batch, statistics=False)
    except ValueError as error:
        if not too_few_for_norm(error):
            raise
        raise UsageError(f"{cause}, which is too few for the model's BatchNorm: {remedy}.") from error
