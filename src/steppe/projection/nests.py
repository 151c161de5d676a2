"""Tensors in what layers take and return: tuples, lists, dictionaries, packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def map_tensors(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor in a nest.

    Args:
        nest: A tensor, or tuples, named tuples, lists and dictionaries of them; anything else is left as it is.
        change: Applied to every tensor.

    Returns:
        The nest with the changed tensors.

    Example:
        >>> import torch
        >>> from steppe.projection.nests import map_tensors
        >>> map_tensors((torch.ones(2), [None, torch.ones(1)]), lambda x: 2 * x)
        (tensor([2., 2.]), [None, tensor([2.])])
    """
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, tuple):
        parts = [map_tensors(part, change) for part in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else tuple(parts)
    if type(nest) is list:
        return [map_tensors(part, change) for part in nest]
    if type(nest) is dict:
        return {key: map_tensors(part, change) for key, part in nest.items()}
    return nest


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nest."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for part in nest:
            yield from tensors_in(part)
    elif isinstance(nest, dict):
        for part in nest.values():
            yield from tensors_in(part)
