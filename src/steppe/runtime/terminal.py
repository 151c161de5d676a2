"""Printing text from outside (names, other programs' errors) without letting it control the terminal."""

from __future__ import annotations

import unicodedata
from typing import Any

_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # reverse the direction of the text that follows


def escape_controls(text: str) -> str:
    r"""Escape control characters, except newlines and tabs.

    Args:
        text: The text.

    Returns:
        The escaped text.

    Example:
        >>> print(escape_controls("\x1b[2J"))
        \x1b[2J
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escape, text))


def say(*values: object, **options: Any) -> None:
    """`print` with control characters escaped."""
    print(*(escape_controls(str(value)) for value in values), **options)


def _escape(sign: str) -> str:
    is_control = sign in _DIRECTIONS or (sign not in "\n\t" and unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp"))
    return sign.encode("unicode_escape").decode() if is_control else sign
