"""Samples that are read when they are needed: of a `Dataset`, an `IterableDataset` or a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from steppe.data.collate import Pair, check_pair, collate_samples, collated
from steppe.data.peek import first_samples, preserve_all_global_rngs
from steppe.data.samples_base import Samples
from steppe.errors import DataError
from steppe.tensors.nest import index_nest


class DatasetSamples(Samples):
    """Samples of a map-style `Dataset`, read and collated when needed."""

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__len__"):
            raise DataError("is a Dataset without a length; add __len__, or make it an IterableDataset.")
        self.dataset: Dataset[Any] = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def take(self, indices: Tensor) -> Pair:
        return check_pair(collate_samples([self.dataset[int(i)] for i in indices]), indices)


class StreamSamples(Samples):
    """Samples of an `IterableDataset`, in its own order, collated into batches.

    Every pass iterates over it anew. A dataset that is its own iterator can be read once; what was read to check the
    samples is given back then.
    """

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self.dataset = dataset
        self._head: list[Any] = []
        self._rest: Iterator[Any] | None = None  # of a dataset that is its own iterator, behind `_head`

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    @property
    def count(self) -> int | None:
        return known_length(self.dataset)

    def take(self, indices: Tensor) -> Pair:
        self.require_indexable()
        raise AssertionError

    def require_indexable(self) -> None:
        raise DataError("is an IterableDataset, whose samples cannot be indexed; pass a Dataset or tensors.")

    def first(self, count: int = 1) -> Pair:
        if len(self._head) < count:
            with preserve_all_global_rngs():
                self._look(count)
        if not self._head:
            raise DataError("is empty.")
        return check_pair(collate_samples(self._head[:count]))

    def _look(self, count: int) -> None:
        if not isinstance(self.dataset, Iterator):
            self._head = list(islice(self.dataset, count))
            return
        self._rest = iter(self.dataset) if self._rest is None else self._rest
        self._head += islice(self._rest, count - len(self._head))

    def batches(self, size: int, order: torch.Generator | None, skip: int = 0) -> Iterator[Pair]:
        samples = iter(self.dataset)
        if self._rest is not None:
            samples, self._rest = chain(self._head, samples), None
        return self._collated(islice(samples, size * skip, None), size)

    @staticmethod
    def _collated(samples: Iterator[Any], size: int) -> Iterator[Pair]:
        while several := list(islice(samples, size)):
            yield check_pair(collate_samples(several))

    def count_batches(self, size: int) -> int | None:
        return None if self.count is None else -(-self.count // size)


class LoaderSamples(Samples):
    """Samples of a `DataLoader`, with its own batch size and order."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._streams = isinstance(loader.dataset, IterableDataset)
        if not self._streams and known_length(loader.dataset) is None:
            raise DataError("is a DataLoader over a dataset without a length; pass one with a length.")
        self._head: Any = None  # the first batch of a dataset that is its own iterator
        self._rest: Iterator[Any] | None = None  # the batches behind it

    def __len__(self) -> int:
        return len(cast(Sized, self.loader.dataset))

    @property
    def count(self) -> int | None:
        return known_length(self.loader.dataset)

    def take(self, indices: Tensor) -> Pair:
        self.require_indexable()
        raise AssertionError

    def require_indexable(self) -> None:
        raise DataError("is a DataLoader, whose samples cannot be indexed; pass a Dataset or tensors.")

    def batches(self, size: int, order: torch.Generator | None, skip: int = 0) -> Iterator[Pair]:
        if self._rest is None:
            pairs: Iterator[Any] = iter(self.loader)
        else:
            pairs, self._rest = chain([self._head], self._rest), None
        for _ in range(skip):  # the loader alone knows its order
            next(pairs, None)
        return (check_pair(pair) for pair in pairs)

    def first(self, count: int = 1) -> Pair:
        if self.count == 0:
            raise DataError("is empty.")
        with preserve_all_global_rngs():
            if isinstance(self.loader.dataset, Iterator):
                return self._first_of_one_pass(count)
            collate = self.loader.collate_fn or default_collate
            return check_pair(collated(collate, self._first_samples(count)))

    def _first_samples(self, count: int) -> Any:
        if not self._streams:
            return first_samples(self.loader, count)
        samples = list(islice(cast(Iterable[Any], self.loader.dataset), count if self.loader.batch_size else 1))
        if not samples:
            raise DataError("is empty.")
        return samples if self.loader.batch_size else samples[0]  # without a batch size, it yields batches

    def _first_of_one_pass(self, count: int) -> Pair:
        if self._head is None:
            self._rest = iter(self.loader)
            self._head = next(self._rest, None)
        if self._head is None:
            raise DataError("is empty.")
        x, y = check_pair(self._head)
        return index_nest(x, slice(count)), y[:count]

    def count_batches(self, size: int) -> int | None:
        try:
            return len(self.loader)
        except TypeError as error:
            if self._streams:
                return None
            raise DataError("is a DataLoader whose sampler has no length; add __len__ to the sampler.") from error


def known_length(dataset: Any) -> int | None:
    """The length of a dataset, if it has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
