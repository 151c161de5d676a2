"""Labelled samples in the three forms users have them: tensors, a `Dataset`, a `DataLoader`."""

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
_DIGEST_INPUTS = 8  # inputs that a digest looks at


class Samples(ABC):
    """A finite set of labelled samples that can be walked through in batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Tensor) -> Pair:
        """The samples at these places."""

    def batches(self, size: int, order: torch.Generator | None, skip: int = 0) -> Iterator[Pair]:
        """Every sample once, in batches (the last may be smaller); shuffled by `order` where one is given. The order is
        drawn at once, and the first `skip` batches of it are passed over.
        """
        count = len(self)
        indices = (
            torch.arange(count, device="cpu") if order is None else torch.randperm(count, generator=order, device="cpu")
        )
        return (self.take(pick) for pick in torch.split(indices, size)[skip:])

    def first(self, count: int = 1) -> Pair:
        """The first samples, or as many as there are, to learn shapes from; draws nothing from any generator."""
        if len(self) == 0:
            raise DataError("is empty: it holds no sample.")
        return next(self.batches(count, None))

    def count_batches(self, size: int) -> int:
        """How many batches a walk takes."""
        return -(-len(self) // size)

    def digest(self) -> str | None:
        """What tells these samples from others, where it can be had without walking through them; None elsewhere."""
        return None


class PixelPermutation:
    """A view of samples, (n, numbers), that shows the numbers of each in another order."""

    def __init__(self, order: Tensor) -> None:
        self.order = order

    def __call__(self, x: Tensor) -> Tensor:
        """The samples as seen."""
        return x[:, to_device(self.order, x.device)]


class TensorSamples(Samples):
    """Samples held in memory as two tensors.

    `view` turns stored samples into those of the task (a pixel permutation, say), batch by batch, so that many tasks
    can share one copy of the images. With `at_hand` all of them are turned when they are first walked through in order,
    and kept.
    """

    def __init__(
        self, x: Tensor, y: Tensor, view: Callable[[Tensor], Tensor] | None = None, *, cache_view: bool = False
    ) -> None:
        check_dense(x, y)
        if x.ndim == 0 or y.ndim != 1 or len(x) != len(y):
            raise DataError(
                f"holds inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}: "
                "give as many labels as inputs, in one dimension."
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
            raise DataError("is empty: it holds no sample.")
        return self._part(slice(0, count))  # of `at_hand` samples not all need to be turned for that

    def digest(self) -> str:
        """A hash of all labels and of a few inputs. Of real numbers only the leading digits count: the last ones may
        come out otherwise where the same data is made on another machine.
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
            x = x.clone()  # a model may work in place, and the user's data must not change
        return self._apply_view(x), self.y[pick]

    def _apply_view(self, x: Tensor) -> Tensor:
        return x if self.view is None else self.view(x)


class DatasetSamples(Samples):
    """Samples of a map-style `Dataset` that gives (input, label) pairs; read and collated as they are needed."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise DataError(
                "is a Dataset without a length, or an IterableDataset: give a map-style Dataset, a DataLoader or "
                "tensors."
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def take(self, indices: Tensor) -> Pair:
        return _check_pair(_collate(default_collate, [self.dataset[int(i)] for i in indices]), indices)


class LoaderSamples(Samples):
    """Samples that a `DataLoader` gives; its own batch size and order are kept, as its owner set them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        try:
            self._length = len(cast(Sized, loader.dataset))
        except TypeError as error:
            raise DataError("is a DataLoader over a dataset without a length: give one with a length.") from error

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Tensor) -> Pair:
        raise DataError("is a DataLoader, whose samples come in its own order: give a Dataset or tensors here.")

    def batches(self, size: int, order: torch.Generator | None, skip: int = 0) -> Iterator[Pair]:
        pairs = iter(self.loader)
        for _ in range(skip):  # the loader alone knows its order
            next(pairs, None)
        return (_check_pair(pair) for pair in pairs)

    def first(self, count: int = 1) -> Pair:
        if len(self) == 0:
            raise DataError("is empty: it holds no sample.")
        if isinstance(self.loader.dataset, IterableDataset):
            raise DataError("is a DataLoader over an IterableDataset: give one over a map-style Dataset, or tensors.")
        with preserve_all_global_rngs():
            given = first_samples(self.loader, count)
            return _check_pair(_collate(self.loader.collate_fn or default_collate, given))

    def count_batches(self, size: int) -> int:
        try:
            return len(self.loader)
        except TypeError as error:
            raise DataError("is a DataLoader whose sampler has no length: give the sampler a __len__.") from error


def as_samples(source: object) -> Samples:
    """The samples behind whatever form the user gave."""
    if isinstance(source, Samples):
        return source
    if isinstance(source, DataLoader):
        return LoaderSamples(source)
    if isinstance(source, Dataset):
        return DatasetSamples(source)
    if isinstance(source, (tuple, list)) and len(source) == 2:
        return TensorSamples(as_tensor(source[0]), as_tensor(source[1]))
    raise DataError(
        f"is given as {type(source).__name__}: give a pair (inputs, labels) of tensors or arrays, "
        "a Dataset or a DataLoader."
    )


def as_labels(y: Tensor) -> Tensor:
    """Labels as int64 class numbers; anything that is not a whole number is refused."""
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"has labels of type {y.dtype}: give class numbers as integers.")
    return y.long()


def check_finite(x: Tensor, indices: Tensor | None = None) -> None:
    """Refuse inputs with NaN or infinity, naming such a sample by its place in the data where that is known."""
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        row = int((~torch.isfinite(x).reshape(len(x), -1).all(1)).nonzero()[0])
        place = row if indices is None else int(indices[row])
        raise DataError(f"holds NaN or infinity in its inputs, first in sample {place}: clean the data.")


def _collate(collate: Callable[[Any], Any], samples: Any) -> Any:
    for sample in samples if isinstance(samples, (list, tuple)) else []:
        check_unmasked(*(sample if isinstance(sample, (list, tuple)) else [sample]))
    try:
        return collate(samples)
    except (TypeError, RuntimeError, ValueError) as error:
        raise DataError(
            f"cannot be put together into a batch ({one_line(error)}): let every sample be a tensor or array, all "
            "of one shape, with a class number (of images: add a transform such as ToTensor; of sequences: pad them)."
        ) from error


def _check_pair(pair: Any, indices: Tensor | None = None) -> Pair:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
        raise DataError("gives something else than (input, label) pairs of tensors or numbers.")
    x, y = pair
    check_dense(x, y)
    if x.ndim == 0 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"gives a batch of inputs of shape {tuple(x.shape)} with labels of shape {tuple(y.shape)}: "
            "give one class number with each input."
        )
    check_finite(x, indices)
    return _without_inference_mode(x.detach()), _without_inference_mode(as_labels(y))


def _without_inference_mode(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one made under `torch.inference_mode`: no gradient can be taken through such a one, and
    a copy made under it would be no better.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
