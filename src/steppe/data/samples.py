"""Labelled samples in the forms that users have: tensors, a `Dataset`, an `IterableDataset`, a `DataLoader`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from steppe.data.collate import TARGETS, Pair, as_nest, checked, split_targets
from steppe.data.dataset_samples import DatasetSamples, LoaderSamples, StreamSamples
from steppe.data.samples_base import Samples
from steppe.errors import DataError
from steppe.runtime.devices import to_device
from steppe.tensors.nest import Nest, index_nest, leaves, map_nest, named_leaves
from steppe.tensors.ragged import Ragged

_DIGEST_INPUTS = 8  # inputs that are hashed


class PixelPermutation:
    """Permutes the features of flat samples, (n, features).

    Example:
        >>> PixelPermutation(torch.tensor([2, 0, 1]))(torch.tensor([[5, 6, 7]]))
        tensor([[7, 5, 6]])
    """

    def __init__(self, order: Tensor) -> None:
        self.order = order

    def __call__(self, x: Tensor) -> Tensor:
        """The permuted samples."""
        return x[:, to_device(self.order, x.device)]


class TensorSamples(Samples):
    """Samples in memory as tensors.

    Args:
        x: Inputs: a tensor, or a dictionary or tuple of tensors and `Ragged`.
        y: Labels: class numbers, or whatever the loss takes.
        view: Turns stored inputs into the task's (a pixel permutation, say), batch by batch, so that many tasks can
            share one copy of the images.
        cache_view: Apply the view to all inputs at the first pass in order, and keep the result.

    Raises:
        DataError: They are not dense tensors of equal length, or inputs are not finite.
    """

    def __init__(
        self, x: Nest, y: Tensor | Ragged, view: Callable[[Tensor], Tensor] | None = None, *, cache_view: bool = False
    ) -> None:
        self.x, self.y = checked(x, y, "has")
        self.view = view
        self._cache_view = cache_view and view is not None

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: Tensor) -> Pair:
        x = map_nest(lambda leaf: leaf[to_device(indices, leaf.device)], self.x)
        return self._apply_view(x), self.y[to_device(indices, self.y.device)]

    def batches(self, size: int, order: torch.Generator | None, skip: int = 0) -> Iterator[Pair]:
        if order is not None:
            return super().batches(size, order, skip)
        if self._cache_view:
            return self._cached.batches(size, None, skip)
        starts = range(skip * size, len(self), size)
        return (self._part(slice(start, start + size)) for start in starts)

    def first(self, count: int = 1) -> Pair:
        if len(self) == 0:
            raise DataError("is empty.")
        return self._part(slice(0, count))  # without applying a cached view to all

    def digest(self) -> str:
        """Hash all labels and a few inputs.

        The inputs are rounded to bfloat16, as their last digits may differ if they are computed on another machine.

        Returns:
            The hash in hexadecimal.
        """
        few = torch.tensor(
            sorted({place * (len(self) - 1) // (_DIGEST_INPUTS - 1) for place in range(_DIGEST_INPUTS)}), device="cpu"
        )
        shapes = [(name, *_size(leaf)) if name else _size(leaf) for name, leaf in named_leaves(self.x)]
        total = hashlib.sha256(str(shapes[0] if isinstance(self.x, Tensor) else shapes).encode())
        for part in (self.y, *(_rounded(leaf[to_device(few, leaf.device)]) for leaf in leaves(self.x))):
            numbers = (part.flat() if isinstance(part, Ragged) else part).cpu()
            total.update(numbers.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()

    @functools.cached_property
    def _cached(self) -> TensorSamples:
        return TensorSamples(self.x if self.view is None else self.view(self.x), self.y)

    def _part(self, pick: slice) -> Pair:
        x = index_nest(self.x, pick)
        x = map_nest(
            lambda leaf: leaf.clone() if leaf.dtype.is_floating_point else leaf, x
        )  # a model may work in place
        return self._apply_view(x), self.y[pick]

    def _apply_view(self, x: Nest) -> Nest:
        return x if self.view is None else self.view(x)


def _own(leaf: Tensor | Ragged) -> Tensor | Ragged:
    return leaf.clone() if leaf.dtype.is_floating_point else leaf  # a model may work in place


def _size(leaf: Tensor | Ragged) -> tuple[int | None, ...]:
    """The shape; with the number of all elements if the sequences have several lengths."""
    return (*leaf.shape, sum(map(len, leaf.rows))) if isinstance(leaf, Ragged) else tuple(leaf.shape)


def _rounded(leaf: Tensor | Ragged) -> Tensor | Ragged:
    """Floating-point numbers with few digits, the last of which may differ between machines."""
    return leaf.to(torch.bfloat16) if leaf.dtype.is_floating_point else leaf


def as_samples(source: object) -> Samples:
    """Wrap data in any of the accepted forms.

    Args:
        source: A pair (inputs, labels), a dictionary of inputs with the labels under "labels" or "label", a `Dataset`,
            an `IterableDataset` or a `DataLoader`. Inputs and labels are tensors, arrays or lists of samples; inputs
            may be dictionaries and tuples of these.

    Returns:
        The samples; `source` itself if it is a `Samples`.

    Raises:
        DataError: It is none of these.

    Example:
        >>> len(as_samples((torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))))
        4
        >>> len(as_samples({"ids": torch.zeros(4, 3), "mask": torch.ones(4, 3), "labels": [0, 1, 0, 1]}))
        4
    """
    if isinstance(source, Samples):
        return source
    if isinstance(source, DataLoader):
        return LoaderSamples(source)
    if isinstance(source, IterableDataset):
        return StreamSamples(source)
    if isinstance(source, Dataset) or _is_dataset_like(source):
        return DatasetSamples(source)
    if isinstance(source, Mapping) and any(key in source for key in TARGETS):
        x, y = split_targets(source)
        return TensorSamples(as_nest(x), as_nest(y))
    if isinstance(source, (tuple, list)) and len(source) == 2:
        return TensorSamples(as_nest(source[0]), as_nest(source[1]))
    raise DataError(
        f"has the type {type(source).__name__}; expected a pair (inputs, labels) of tensors or arrays, a dictionary "
        "with 'labels', a Dataset or a DataLoader."
    )


def _is_dataset_like(source: object) -> bool:
    """Whether a `DataLoader` would take it for a dataset, though it is no `Dataset` (those of Hugging Face are not)."""
    return hasattr(source, "__getitems__") and hasattr(source, "__len__")
