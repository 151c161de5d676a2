"""Exception types and helpers for their messages; the command line turns each into one line and an exit code."""

from __future__ import annotations

import difflib
import errno
import unicodedata
from collections.abc import Iterable

_MAX_SHOWN = 100  # characters of a value


class SteppeError(Exception):
    """Base class of all errors raised by steppe; the message says what is wrong and what to do."""

    exit_code = 1


class UsageError(SteppeError):
    """Invalid use: an unknown name, a value out of range, arguments that contradict each other."""

    exit_code = 2


class DataError(SteppeError):
    """Invalid task data: empty, non-finite, of the wrong shape, or with labels outside the head."""


class ShapesDifferError(DataError):
    """Samples that must be stacked have different shapes; the learner adds which task they belong to."""


class ModelError(SteppeError):
    """The model does not suit the method, for example because no layer can be protected."""


class DivergedError(SteppeError):
    """The loss or a gradient became NaN or infinite."""


class LayerDivergedError(DivergedError):
    """The inputs of a layer became NaN or infinite; the learner adds the task."""


class RunError(SteppeError):
    """A run directory cannot be written or read."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Build the error for an unknown name, with the closest known one as a suggestion.

    Args:
        kind: What the name stands for, such as "method".
        name: The unknown name.
        known: All valid names.

    Returns:
        The error, for the caller to raise.

    Example:
        >>> print(unknown_name("method", "fs-dgmp", ["er", "fs-dgpm"]))
        unknown method 'fs-dgmp'. Did you mean 'fs-dgpm'? Known: er, fs-dgpm.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {short_repr(name)}.{hint} Known: {', '.join(names)}.")


def short_repr(value: object) -> str:
    """Return the `repr` of a value, shortened to fit in an error message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int with thousands of digits, deeply nested lists
        return f"(of type {type(value).__name__}, too long to show)"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text):,} characters)"


def has_control_characters(text: str) -> bool:
    """Return whether the text contains control characters, which a terminal would interpret, or lone surrogates."""
    return any(unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t" for char in text)


def one_line(error: BaseException) -> str:
    """Return an error's message with its lines joined; its type name if the message is empty."""
    return " ".join(part for line in str(error).splitlines() if (part := line.strip())) or type(error).__name__


def os_error_text(error: OSError) -> str:
    """Describe why the operating system refused to read or write a file."""
    return {
        errno.ENOSPC: "no space left on disk",
        errno.EDQUOT: "disk quota exceeded",
        errno.EACCES: "permission denied",
        errno.EROFS: "read-only file system",
    }.get(error.errno or 0, error.strerror or str(error))
