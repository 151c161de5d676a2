"""Floating-point state of the process, changed for a while and given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Numbers too small to matter count as zero inside.

    Momentum of inputs that are always zero decays into denormals, which slow a step of the MLP nearly twofold.
    """
    found = _flushing()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(found)


def _flushing() -> bool:
    """Whether denormals are flushed now; torch can set it but not tell it."""
    smallest = torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64)
    return not bool(smallest / 2)
