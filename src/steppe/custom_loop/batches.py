"""Batches as users have them: tensors, pairs, dictionaries, tokenizer output, or an iterable of any of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import DataError, UsageError
from steppe.runtime.devices import to_device
from steppe.tensors.model_call import arguments
from steppe.tensors.nest import Nest, index_nest, leaves, map_nest

Forward = Callable[[nn.Module, Any], object]
"""Runs a model on a batch."""

LABELS = "labels"
"""The key of a dictionary that is not passed to the model."""


def call_on_batch(model: nn.Module, batch: Nest) -> object:
    """Run a model on a batch the way most batches are meant.

    Args:
        model: The model.
        batch: Of a tuple or list, the first part is the input, and the rest labels. An input that is a dictionary is
            passed as keywords, without "labels"; a tuple as positional arguments; anything else as it is. Tensors are
            moved to the model's device.

    Returns:
        The model's output.

    Raises:
        TypeError: The model does not take such arguments.

    Example:
        >>> x, y = torch.zeros(3, 4), torch.zeros(3)
        >>> call_on_batch(torch.nn.Linear(4, 2), (x, y)).shape
        torch.Size([3, 2])
    """
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(x, Mapping):
        x = {key: value for key, value in x.items() if key != LABELS}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    args, kwargs = arguments(map_nest(lambda leaf: to_device(leaf, device) if isinstance(leaf, Tensor) else leaf, x))
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        error.add_note(
            f"(steppe called the model with {_described(args, kwargs)}; if it is called in another way, pass "
            "forward=lambda model, batch: ...)"
        )
        raise


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    named = f"the keywords {', '.join(kwargs)}" if kwargs else ""
    return " and ".join(part for part in (f"{len(args)} positional argument(s)" if args else "", named) if part)


def copied(batch: Nest) -> Nest:
    """The batch with its tensors copied, for a model that may change them in place."""
    return map_nest(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)


def as_batches(batches: object) -> Iterable[Nest]:
    """The batches to iterate over.

    Args:
        batches: An iterable of batches. A tensor, a dictionary, or a tuple of tensors is a single batch.

    Returns:
        The iterable.

    Raises:
        UsageError: It is not iterable.
    """
    is_parts = isinstance(batches, tuple) and any(isinstance(part, Tensor) for part in batches)
    if isinstance(batches, (Tensor, Mapping)) or is_parts:
        return [batches]
    if not isinstance(batches, Iterable):
        raise UsageError(
            f"expected batches, got {type(batches).__name__}; pass a DataLoader, a list of batches, or one batch."
        )
    return batches


def first_samples(batches: Iterable[Nest], count: int | None) -> Iterator[Nest]:
    """Yield batches until so many samples were seen; the last batch is cut.

    Args:
        batches: The batches.
        count: How many samples; None for all.

    Yields:
        The batches.

    Raises:
        DataError: A batch has no tensor to count samples by.
    """
    if count is None:
        yield from batches
        return
    for batch in batches:
        size = _size(batch)
        yield batch if size <= count else index_nest(batch, slice(0, count))
        count -= size
        if count <= 0:
            return


def _size(batch: Nest) -> int:
    tensor = next((leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if tensor is None:
        raise DataError(
            f"max_samples needs batches of tensors to count samples by, got {type(batch).__name__}; leave it out."
        )
    return tensor.shape[0]
