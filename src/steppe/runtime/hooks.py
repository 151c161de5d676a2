"""Hooks on modules that are always removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def temporary_hooks() -> Iterator[list[RemovableHandle]]:
    """Yield a list for the handles of hooks, all of which are removed at the end, also after an error.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2)
        >>> with temporary_hooks() as hooks:
        ...     hooks.append(layer.register_forward_hook(lambda layer, args, output: None))
        >>> len(layer._forward_hooks)
        0
    """
    handles: list[RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
