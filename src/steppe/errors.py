"""What can go wrong, as types: the command line turns each into one line and an exit code."""

from __future__ import annotations

import difflib
import errno
import unicodedata
from collections.abc import Iterable

_MAX_SHOWN = 100  # characters of a value


class SteppeError(Exception):
    """Base of every error that `steppe` raises on purpose; its text names the thing and the remedy."""

    exit_code = 1


class UsageError(SteppeError):
    """Asked for something that does not exist or cannot be: an unknown name, a value out of range."""

    exit_code = 2


class DataError(SteppeError):
    """The data of a task cannot be learnt from: empty, not finite, wrong shape, labels outside the head."""


class ShapesDifferError(DataError):
    """Samples of two shapes, where they must be kept together; whose they are is for the learner to say."""


class ModelError(SteppeError):
    """The model cannot serve the method: no covered layer, weights tied in a way we cannot project."""


class DivergedError(SteppeError):
    """The loss or a gradient stopped being a finite number."""


class LayerDivergedError(DivergedError):
    """A layer's inputs stopped being finite numbers; in which task is for the learner to say."""


class RunError(SteppeError):
    """A run directory cannot be written or read."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not among the known ones, with the nearest of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {short_repr(name)}.{hint} Known: {', '.join(names)}.")


def short_repr(value: object) -> str:
    """A value as an error's text shows it: never longer than a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists within lists within lists
        return f"(of type {type(value).__name__}, too long to show)"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text):,} characters)"


def has_control_characters(text: str) -> bool:
    """Whether there are signs in it that a terminal would obey instead of showing them, or halves of characters."""
    return any(unicodedata.category(sign) in ("Cc", "Cs") and sign not in "\n\t" for sign in text)


def one_line(error: BaseException) -> str:
    """What an error says, without the line breaks that other people's errors have."""
    return " ".join(part for line in str(error).splitlines() if (part := line.strip())) or type(error).__name__


def os_error_text(error: OSError) -> str:
    """Why the disk would not take something, in words."""
    return {
        errno.ENOSPC: "no space is left on the disk",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "permission is denied",
        errno.EROFS: "the file system is read-only",
    }.get(error.errno or 0, error.strerror or str(error))
