"""Look at the first samples of a `DataLoader` without drawing from any random number generator.

The dataset's item 0 will not do if the loader has its own sampler: that may never yield 0, or may yield names or lists
instead of indices. So the sampler is asked; more precisely a copy of it with copied generators, since looking must not
change the order of the samples.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from steppe.errors import DataError
from steppe.runtime.rng import preserve_global_rng

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class _IteratorError(Exception):
    """The sampler holds an iterator, which can be read only once."""


@contextmanager
def preserve_all_global_rngs() -> Iterator[None]:
    """Restore the global generators of torch, Python and NumPy afterwards, which data loading may draw from."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with preserve_global_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def first_samples(loader: DataLoader[Any], count: int) -> Any:
    """The first samples, as the loader would pass them to its collate function.

    Args:
        loader: The loader.
        count: The largest number of samples; ignored if the dataset makes the batches itself.

    Returns:
        The samples; what the dataset returns for the first index if it makes the batches itself.
    """
    if loader.batch_sampler is None:
        return loader.dataset[next(_indices(loader, loader.sampler))]
    places = list(islice(_indices(loader, loader.batch_sampler), count))
    together = getattr(loader.dataset, "__getitems__", None)
    return together(places) if together else [loader.dataset[place] for place in places]


def _indices(loader: DataLoader[Any], sampler: Any) -> Iterator[Any]:
    """The indices in the sampler's order, at least one."""
    if _is_default_sampler(loader, sampler):
        return iter(range(len(loader.dataset)))  # type: ignore[arg-type]
    try:
        given = iter(_copy_sampler(sampler, {}))
    except (_IteratorError, TypeError, copy.Error):  # it cannot be copied, so use index 0
        return iter(range(len(loader.dataset)))  # type: ignore[arg-type]
    places = given if loader.batch_sampler is None else chain.from_iterable(given)
    try:
        return chain([next(places)], places)
    except StopIteration:
        raise DataError("yields no batch (drop_last with too few samples?).") from None


def _is_default_sampler(loader: DataLoader[Any], sampler: Any) -> bool:
    """Whether it is a loader's default sampler, shuffling or not: then index 0 is as good as any, and cheaper."""
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is loader.dataset


def _copy_sampler(part: Any, known: dict[int, Any], *, sampler: bool = True) -> Any:
    """Copy a sampler, or a part of one, with its generators, inner samplers and lists of indices (which some samplers
    shuffle). Everything else is shared.

    Args:
        part: The sampler or part.
        known: The copies made so far, by the id of the original.
        sampler: Whether `part` may be a sampler even if it is not a `Sampler`.

    Returns:
        The copy, or `part` itself if it can be shared.

    Raises:
        _IteratorError: It contains an iterator.
    """
    if id(part) in known:
        return known[id(part)]
    if isinstance(part, Iterator):
        raise _IteratorError
    twin: Any
    if isinstance(part, _GENERATORS):
        twin = copy.deepcopy(part)
    elif isinstance(part, np.ndarray):
        twin = part.copy() if part.ndim == 1 else part
    elif isinstance(part, (list, dict)):
        twin = copy.copy(part)
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
            if not isinstance(inner, (int, str)):
                twin[key] = _copy_sampler(inner, known, sampler=False)
    elif (sampler or isinstance(part, Sampler)) and hasattr(part, "__dict__") and not isinstance(part, torch.Tensor):
        twin = copy.copy(part)
        for name, inner in vars(part).items():
            vars(twin)[name] = _copy_sampler(inner, known, sampler="sampler" in name)
    else:
        return part
    known[id(part)] = twin
    return twin
