"""The one switch for all fast paths: set the environment variable `STEPPE_FAST=0` to compute with plain PyTorch only.

Every fast path asks `fast_paths_enabled` before it is chosen: when a model is wrapped or a task begins, or within
calls that are expensive themselves, so that the question costs nothing per update.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from steppe.errors import UsageError, short_repr

VARIABLE = "STEPPE_FAST"
_VALUES = {"": True, "1": True, "0": False}
_override: bool | None = None


def fast_paths_enabled() -> bool:
    """Whether fast paths may be taken.

    Returns:
        False with `STEPPE_FAST=0` in the environment or inside `fast_paths(False)`, True otherwise.

    Raises:
        UsageError: `STEPPE_FAST` is set to something other than 0 or 1.
    """
    if _override is not None:
        return _override
    value = os.environ.get(VARIABLE, "")
    if value not in _VALUES:
        raise UsageError(f"{VARIABLE}={short_repr(value)}: expected 0 (plain PyTorch only) or 1 (the default).")
    return _VALUES[value]


@contextmanager
def fast_paths(enabled: bool) -> Iterator[None]:
    """Turn fast paths on or off inside, for the whole process, whatever the environment says.

    A learner made inside keeps what was chosen for it until its next task begins, so create and use it inside.

    Args:
        enabled: Whether fast paths may be taken.

    Example:
        >>> from steppe.fast.switch import fast_paths, fast_paths_enabled
        >>> with fast_paths(False):
        ...     fast_paths_enabled()
        False
    """
    global _override
    previous, _override = _override, enabled
    try:
        yield
    finally:
        _override = previous
