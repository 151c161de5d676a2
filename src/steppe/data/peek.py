"""What a `DataLoader` will give first, found without drawing anything from anybody's generator.

Its dataset's first place tells nothing where the loader has a sampler of its own: that may never give this place, or
give names or lists of places instead of numbers. So the sampler itself is asked; or rather a copy of it, that draws
from copies of its generators, as its owner's order must not depend on whether somebody has had a look.
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
    """An iterator: what is taken from it is gone."""


@contextmanager
def preserve_all_global_rngs() -> Iterator[None]:
    """Samplers, datasets and collating functions may draw inside from torch's, Python's and NumPy's global generators,
    which are then as they were.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with preserve_global_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def first_samples(loader: DataLoader[Any], count: int) -> Any:
    """What the loader would give its collating function, of so many samples or as many as there are; where it does not
    make batches itself, the dataset's first batch.
    """
    if loader.batch_sampler is None:
        return loader.dataset[next(_indices(loader, loader.sampler))]
    places = list(islice(_indices(loader, loader.batch_sampler), count))
    together = getattr(loader.dataset, "__getitems__", None)
    return together(places) if together else [loader.dataset[place] for place in places]


def _indices(loader: DataLoader[Any], sampler: Any) -> Iterator[Any]:
    """The places that come first; never none."""
    if _is_default_sampler(loader, sampler):
        return iter(range(len(loader.dataset)))  # type: ignore[arg-type]
    try:
        given = iter(_copy_sampler(sampler, {}))
    except (_IteratorError, TypeError, copy.Error):  # nothing is known of it but that it will give some place
        return iter(range(len(loader.dataset)))  # type: ignore[arg-type]
    places = given if loader.batch_sampler is None else chain.from_iterable(given)
    try:
        return chain([next(places)], places)
    except StopIteration:
        raise DataError("gave no batch (a DataLoader that drops its last?).") from None


def _is_default_sampler(loader: DataLoader[Any], sampler: Any) -> bool:
    """Whether the sampler is what a loader has by default, shuffling or not: then any place serves, and the first one
    costs nothing and is always the same.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is loader.dataset


def _copy_sampler(part: Any, known: dict[int, Any], *, sampler: bool = True) -> Any:
    """A sampler, or a part of one, that gives what the other would, and leaves the other as it is: with copies of its
    generators, of its samplers, and of lists of places, which some shuffle. Whatever else it holds they share.
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
