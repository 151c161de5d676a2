"""Text for a terminal, which would obey some of the characters that names and other people's errors may hold."""

from __future__ import annotations

import unicodedata
from typing import Any

_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # which turn the text that follows around


def visible(text: str) -> str:
    r"""The text with such characters written out, as \x1b for the one that begins a command; lines stay lines."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_written_out, text))


def say(*values: object, **options: Any) -> None:
    """Print values, visibly."""
    print(*(visible(str(value)) for value in values), **options)


def _written_out(sign: str) -> str:
    obeyed = sign in _DIRECTIONS or (sign not in "\n\t" and unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp"))
    return sign.encode("unicode_escape").decode() if obeyed else sign
