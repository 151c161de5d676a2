"""Labelled samples in the three forms that users have: tensors, a `Dataset`, a `DataLoader`."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from steppe.data.peek import first_samples, preserve_all_global_rngs
from steppe.data.tensors import as_tensor, check_dense, check_unmasked
from steppe.errors import DataError, one_line
from steppe.runtime.devices import to_device

Pair = tuple[Tensor, Tensor]
_DIGEST_INPUTS = 8  # inputs that are hashed


class Samples(ABC):
    """A finite set of labelled samples that is read in batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Tensor) -> Pair:
        """The samples with these indices."""

    def batches(self, size: int, order: torch.Generator | None, skip: int = 0) -> Iterator[Pair]:
        """Iterate over all samples once.

        Args:
            size: Samples per batch; the last batch may be smaller.
            order: Shuffles the samples as soon as this is called; None keeps their order.
            skip: How many batches to leave out at the beginning.

        Returns:
            An iterator over the batches.
        """
        count = len(self)
        indices = (
            torch.arange(count, device="cpu") if order is None else torch.randperm(count, generator=order, device="cpu")
        )
        return (self.take(pick) for pick in torch.split(indices, size)[skip:])

    def first(self, count: int = 1) -> Pair:
        """The first samples, at most `count`, to find out shapes; draws from no random number generator."""
        if len(self) == 0:
            raise DataError("is empty.")
        return next(self.batches(count, None))

    def count_batches(self, size: int) -> int:
        """The number of batches of one pass."""
        return -(-len(self) // size)

    def digest(self) -> str | None:
        """A hash that identifies the data, or None if it would take a pass through them."""
        return None


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
    """Samples in memory as two tensors.

    Args:
        x: Inputs.
        y: Labels, class numbers.
        view: Turns stored inputs into the task's (a pixel permutation, say), batch by batch, so that many tasks can
            share one copy of the images.
        cache_view: Apply the view to all inputs at the first pass in order, and keep the result.

    Raises:
        DataError: They are not dense tensors of equal length, labels are not integers, or inputs are not finite.
    """

    def __init__(
        self, x: Tensor, y: Tensor, view: Callable[[Tensor], Tensor] | None = None, *, cache_view: bool = False
    ) -> None:
        check_dense(x, y)
        if x.ndim == 0 or y.ndim != 1 or len(x) != len(y):
            raise DataError(
                f"has inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}; "
                "expected one class number per input."
            )
        self.x, self.y, self.view = _without_inference_mode(x.detach()), _without_inference_mode(as_labels(y)), view
        self._cache_view = cache_view and view is not None
        check_finite(x)

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: Tensor) -> Pair:
        return self._apply_view(self.x[to_device(indices, self.x.device)]), self.y[to_device(indices, self.y.device)]

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
        few = self.x[sorted({place * (len(self) - 1) // (_DIGEST_INPUTS - 1) for place in range(_DIGEST_INPUTS)})].cpu()
        few = few.to(torch.bfloat16) if few.is_floating_point() else few
        total = hashlib.sha256(str(tuple(self.x.shape)).encode())
        for part in (self.y.cpu(), few):
            total.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()

    @functools.cached_property
    def _cached(self) -> TensorSamples:
        return TensorSamples(self.x if self.view is None else self.view(self.x), self.y)

    def _part(self, pick: slice) -> Pair:
        x = self.x[pick]
        if x.is_floating_point():
            x = x.clone()  # a model may work in place
        return self._apply_view(x), self.y[pick]

    def _apply_view(self, x: Tensor) -> Tensor:
        return x if self.view is None else self.view(x)


class DatasetSamples(Samples):
    """Samples of a map-style `Dataset` of (input, label) pairs, read and collated when needed."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise DataError(
                "is a Dataset without a length, or an IterableDataset; pass a map-style Dataset, a DataLoader or "
                "tensors."
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def take(self, indices: Tensor) -> Pair:
        return _check_pair(_collate(default_collate, [self.dataset[int(i)] for i in indices]), indices)


class LoaderSamples(Samples):
    """Samples of a `DataLoader`, with its own batch size and order."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        try:
            self._length = len(cast(Sized, loader.dataset))
        except TypeError as error:
            raise DataError("is a DataLoader over a dataset without a length; pass one with a length.") from error

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Tensor) -> Pair:
        raise DataError("is a DataLoader, whose samples cannot be indexed; pass a Dataset or tensors.")

    def batches(self, size: int, order: torch.Generator | None, skip: int = 0) -> Iterator[Pair]:
        pairs = iter(self.loader)
        for _ in range(skip):  # only the loader knows its order
            next(pairs, None)
        return (_check_pair(pair) for pair in pairs)

    def first(self, count: int = 1) -> Pair:
        if len(self) == 0:
            raise DataError("is empty.")
        if isinstance(self.loader.dataset, IterableDataset):
            raise DataError("is a DataLoader over an IterableDataset; pass one over a map-style Dataset, or tensors.")
        with preserve_all_global_rngs():
            given = first_samples(self.loader, count)
            return _check_pair(_collate(self.loader.collate_fn or default_collate, given))

    def count_batches(self, size: int) -> int:
        try:
            return len(self.loader)
        except TypeError as error:
            raise DataError("is a DataLoader whose sampler has no length; add __len__ to the sampler.") from error


def as_samples(source: object) -> Samples:
    """Wrap data in any of the accepted forms.

    Args:
        source: A pair (inputs, labels) of tensors, arrays or lists, a map-style `Dataset` or a `DataLoader`.

    Returns:
        The samples; `source` itself if it is a `Samples`.

    Raises:
        DataError: It is none of these.

    Example:
        >>> len(as_samples((torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))))
        4
    """
    if isinstance(source, Samples):
        return source
    if isinstance(source, DataLoader):
        return LoaderSamples(source)
    if isinstance(source, Dataset):
        return DatasetSamples(source)
    if isinstance(source, (tuple, list)) and len(source) == 2:
        return TensorSamples(as_tensor(source[0]), as_tensor(source[1]))
    raise DataError(
        f"has the type {type(source).__name__}; expected a pair (inputs, labels) of tensors or arrays, "
        "a Dataset or a DataLoader."
    )


def as_labels(y: Tensor) -> Tensor:
    """Labels as int64; DataError if they are not integers."""
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"has labels of type {y.dtype}; expected integer class numbers.")
    return y.long()


def check_finite(x: Tensor, indices: Tensor | None = None) -> None:
    """Check that inputs have no NaN or infinity.

    Args:
        x: A batch.
        indices: The samples' indices in the data, for the error.

    Raises:
        DataError: It has; the first such sample is named.
    """
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        row = int((~torch.isfinite(x).reshape(len(x), -1).all(1)).nonzero()[0])
        place = row if indices is None else int(indices[row])
        raise DataError(f"has NaN or infinity in its inputs, first in sample {place}; clean the data.")


def _collate(collate: Callable[[Any], Any], samples: Any) -> Any:
    for sample in samples if isinstance(samples, (list, tuple)) else []:
        check_unmasked(*(sample if isinstance(sample, (list, tuple)) else [sample]))
    try:
        return collate(samples)
    except (TypeError, RuntimeError, ValueError) as error:
        raise DataError(
            f"cannot be collated into a batch ({one_line(error)}); every sample must be a tensor or array of the same "
            "shape with a class number (for images, add a transform such as ToTensor; pad sequences)."
        ) from error


def _check_pair(pair: Any, indices: Tensor | None = None) -> Pair:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
        raise DataError("does not yield (input, label) pairs of tensors or numbers.")
    x, y = pair
    check_dense(x, y)
    if x.ndim == 0 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"yields a batch of inputs of shape {tuple(x.shape)} with labels of shape {tuple(y.shape)}; "
            "expected one class number per input."
        )
    check_finite(x, indices)
    return _without_inference_mode(x.detach()), _without_inference_mode(as_labels(y))


def _without_inference_mode(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it was created under `torch.inference_mode`, which autograd cannot use."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
