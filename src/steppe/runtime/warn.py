"""Warnings that point at the user's own line, however deep in `steppe` they are raised."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


class Caution(str):
    """A remark on a task that the user should act on: it is a warning too."""

    __slots__ = ()


class CautionWarning(UserWarning):
    """The warning that a `Caution` is."""


def warn_of(remarks: Iterable[str]) -> None:
    """Warn of each remark that is a `Caution`. Call it when nothing is left to do, as a filter may make it an error."""
    for remark in remarks:
        if isinstance(remark, Caution):
            warn_user(str(remark), CautionWarning)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost stack frame outside `steppe`: the call that the user can change."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)
