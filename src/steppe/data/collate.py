"""From users' samples to batches: pairs of inputs, which may be nests, and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from steppe.data.tensors import as_tensor, check_dense, check_unmasked
from steppe.errors import DataError, one_line
from steppe.tensors.nest import Nest, map_nest, named_leaves, nest_length, nest_shape
from steppe.tensors.ragged import Ragged

Pair = tuple[Nest, Any]
"""Inputs and their targets."""
TARGETS = ("labels", "label")
"""Keys of a dictionary's targets."""
_NO_PAIRS = "does not yield (input, label) pairs of tensors or numbers."


def split_targets(sample: Any) -> Pair:
    """Split a sample or a batch into inputs and targets.

    Args:
        sample: A pair, or a dictionary of inputs with the targets under "labels" or "label".

    Returns:
        Inputs and targets.

    Raises:
        DataError: It is neither.
    """
    if isinstance(sample, Mapping):
        for key in TARGETS:
            if key in sample:
                return {name: sample[name] for name in sample if name != key}, sample[key]
    elif isinstance(sample, (tuple, list)) and len(sample) == 2:
        return sample[0], sample[1]
    raise DataError(_NO_PAIRS)


def collate_samples(samples: Sequence[Any]) -> Pair:
    """Make a batch of samples: a tensor of numbers and tensors of one shape, or a `Ragged` of sequences.

    Args:
        samples: Pairs or dictionaries of one structure.

    Returns:
        Inputs and targets.

    Raises:
        DataError: No batch can be made of them.
    """
    pairs = [split_targets(sample) for sample in samples]
    return _collate_parts([x for x, _ in pairs]), _collate_parts([y for _, y in pairs])


def _collate_parts(parts: Sequence[Any]) -> Nest:
    first = parts[0]
    if isinstance(first, Mapping):
        if any(not isinstance(part, Mapping) or part.keys() != first.keys() for part in parts):
            raise DataError(f"has samples with other keys than {', '.join(map(repr, first))}; give all the same.")
        return {key: _collate_parts([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)) and not _is_array_like(first):
        if any(not isinstance(part, (tuple, list)) or len(part) != len(first) for part in parts):
            raise DataError("has samples with different numbers of inputs; give all the same.")
        return tuple(_collate_parts(part) for part in zip(*parts, strict=True))
    return _collate_leaves(parts)


def _collate_leaves(parts: Sequence[Any]) -> Any:
    check_unmasked(*parts)
    parts = [as_tensor(part) if isinstance(part, (tuple, list)) else part for part in parts]
    if all(isinstance(part, (Tensor, np.ndarray)) and part.ndim for part in parts):
        lengths, features = {len(part) for part in parts}, {tuple(part.shape[1:]) for part in parts}
        if len(lengths) > 1 and len(features) == 1:
            return Ragged(as_tensor(part) for part in parts)
    return collated(default_collate, parts)


def collated(collate: Callable[[Any], Any], samples: Any) -> Any:
    """Call a collate function; DataError if it refuses the samples."""
    for sample in samples if isinstance(samples, (list, tuple)) else []:
        check_unmasked(*(sample if isinstance(sample, (list, tuple)) else [sample]))
    try:
        return collate(samples)
    except (TypeError, RuntimeError, ValueError) as error:
        raise DataError(
            f"cannot be collated into a batch ({one_line(error)}); every sample must be a tensor or array of the same "
            "shape with a class number (for images, add a transform such as ToTensor; for sequences of different "
            "lengths, pass the Dataset instead of a DataLoader, and padding=steppe.Padding(…) to the learner)."
        ) from error


def check_pair(batch: Any, indices: Tensor | None = None) -> Pair:
    """Check what a dataset or loader yields.

    Args:
        batch: A batch, as a pair or a dictionary.
        indices: The samples' indices in the data, for errors.

    Returns:
        Inputs, in dictionaries and tuples, and targets.

    Raises:
        DataError: It is not a batch of inputs and targets.
    """
    x, y = split_targets(batch)
    x = as_dicts_and_tuples(x)
    if not isinstance(y, (Tensor, Ragged)):
        raise DataError(_NO_PAIRS)
    for name, leaf in named_leaves(x):
        if not isinstance(leaf, (Tensor, Ragged)):
            kind = type(leaf).__name__
            raise DataError(
                f"has {name!r} of type {kind}; expected tensors or numbers." if isinstance(x, dict) else _NO_PAIRS
            )
    return checked(x, y, "yields a batch of", indices)


def checked(x: Nest, y: Any, verb: str, indices: Tensor | None = None) -> Pair:
    """Return inputs and targets, detached; DataError if they are not as many finite inputs as targets."""
    for _, leaf in named_leaves(x):
        check_dense(*(leaf.rows if isinstance(leaf, Ragged) else (leaf,)))
    check_dense(*(y.rows if isinstance(y, Ragged) else (y,)))
    if not isinstance(x, Tensor) or x.ndim:
        count = nest_length(x)
    if (isinstance(x, Tensor) and x.ndim == 0) or y.ndim == 0 or count != len(y):
        raise DataError(
            f"{verb} inputs of shape {nest_shape(x)} and labels of shape {nest_shape(y)}; expected one label per input."
        )
    for name, leaf in named_leaves(x):
        check_finite(leaf, indices, name)
    return map_nest(trainable, x), trainable(as_targets(y))


def as_dicts_and_tuples(x: Any) -> Nest:
    """Inputs with mappings as dictionaries, and lists and named tuples as tuples, as files keep them."""
    if isinstance(x, Mapping):
        return {_check_key(key): as_dicts_and_tuples(x[key]) for key in x}
    return tuple(as_dicts_and_tuples(part) for part in x) if isinstance(x, (tuple, list)) else x


def _check_key(key: object) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise DataError(f"has an input with the key {key!r}; expected the name of an argument of the model.")


def as_nest(source: Any) -> Nest:
    """Convert inputs that are given whole.

    Args:
        source: A tensor or array; a list of samples; a dictionary or tuple of inputs.

    Returns:
        Tensors in dictionaries and tuples; `Ragged` for lists of sequences of different lengths.

    Raises:
        DataError: They cannot be converted.
    """
    if isinstance(source, (Tensor, Ragged, np.ndarray)):
        return source if isinstance(source, Ragged) else as_tensor(source)
    if isinstance(source, Mapping):
        return {_check_key(key): as_nest(source[key]) for key in source}
    if isinstance(source, tuple) and not _is_array_like(source):
        return tuple(as_nest(part) for part in source)
    if isinstance(source, list) and source and all(isinstance(row, (Tensor, np.ndarray, list)) for row in source):
        return _from_list(source)
    return as_tensor(source)


def _from_list(rows: list[Any]) -> Tensor | Ragged:
    """A list of samples."""
    if not any(isinstance(row, (Tensor, np.ndarray)) for row in rows):
        try:
            return as_tensor(rows)
        except DataError:
            pass  # of different lengths
    made = [as_tensor(row) for row in rows]
    if len({(row.shape, row.dtype) for row in made}) == 1:
        return torch.stack(made)
    return Ragged(made)


def _is_array_like(source: Sequence[Any]) -> bool:
    """Whether tuples and lists hold nothing but numbers and further such tuples and lists."""
    return all(
        _is_array_like(part) if isinstance(part, (tuple, list)) else isinstance(part, (bool, int, float, np.generic))
        for part in source
    )


def as_targets(y: Any) -> Any:
    """Integers as int64, as class numbers must be; other targets as they are."""
    if y.dtype == torch.bool or y.dtype.is_floating_point or y.dtype.is_complex:
        return y
    return y.to(torch.int64)


def check_finite(x: Tensor | Ragged, indices: Tensor | None = None, name: str = "") -> None:
    """Check that inputs have no NaN or infinity.

    Args:
        x: A batch.
        indices: The samples' indices in the data, for the error.
        name: The input's name, if it has one.

    Raises:
        DataError: It has; the first such sample is named.
    """
    if isinstance(x, Ragged):
        finite = not x.dtype.is_floating_point or bool(torch.isfinite(x.flat()).all())
        for place, sample in enumerate(() if finite else x.rows):
            check_finite(
                sample.unsqueeze(0), torch.tensor([place]) if indices is None else indices[place].reshape(1), name
            )
        return
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        row = int((~torch.isfinite(x).reshape(len(x), -1).all(1)).nonzero()[0])
        place = row if indices is None else int(indices[row])
        where = f"the input {name!r}" if name else "its inputs"
        raise DataError(f"has NaN or infinity in {where}, first in sample {place}; clean the data.")


def trainable(leaf: Any) -> Any:
    """The tensor without a graph; a copy if it was created under `torch.inference_mode`, which autograd cannot use."""
    if isinstance(leaf, Ragged):
        return Ragged(trainable(row) for row in leaf.rows)
    leaf = leaf.detach()
    if not leaf.is_inference():
        return leaf
    with torch.inference_mode(False):
        return leaf.clone()
