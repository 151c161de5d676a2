"""Figures as files: the same figure gives the same bytes, and a file is there whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from steppe.errors import UsageError
from steppe.figures.style import styled
from steppe.runtime.files import explain_write_errors, write_atomic

SUFFIXES = (".pdf", ".svg", ".png")
_UNDATED = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}


def files_for(out: Path | None, name: str) -> list[Path]:
    """Where a figure goes: to the one file named with a suffix, else to one of each kind beside each other."""
    stem = Path(name) if out is None else out / name if out.is_dir() else out
    if stem.suffix in SUFFIXES:
        return [stem]
    if stem.suffix:
        kinds = ", ".join(SUFFIXES)
        raise UsageError(f"{stem}: a figure is written as {kinds}; a name without a suffix gives all of them.")
    return [stem.with_suffix(suffix) for suffix in SUFFIXES]


def content(figure: Any, suffix: str) -> bytes:
    """A figure of matplotlib's as a file of this kind, without a date."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=suffix[1:], metadata=_UNDATED[suffix])
    return buffer.getvalue()


def save(figure: Any, files: list[Path]) -> None:
    """Write every file, or none if one of them cannot be drawn."""
    contents = [content(figure, file.suffix) for file in files]
    for file, data in zip(files, contents, strict=True):
        with explain_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, data)
