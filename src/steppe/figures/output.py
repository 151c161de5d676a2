"""Writing figures to files: the same figure gives the same bytes, and files are written completely or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from steppe.errors import UsageError
from steppe.figures.style import matplotlib_style
from steppe.runtime.files import explain_write_errors, write_atomic

SUFFIXES = (".pdf", ".svg", ".png")
_NO_DATE = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}


def output_files(out: Path | None, name: str) -> list[Path]:
    """The files a figure is written to.

    Args:
        out: A file, a name without suffix for one file of each format, a directory, or None for the current directory.
        name: The figure's name.

    Returns:
        The files, one per format.

    Raises:
        UsageError: The suffix is none of the supported formats.

    Example:
        >>> [str(file) for file in output_files(None, "matrix")]
        ['matrix.pdf', 'matrix.svg', 'matrix.png']
    """
    stem = Path(name) if out is None else out / name if out.is_dir() else out
    if stem.suffix in SUFFIXES:
        return [stem]
    if stem.suffix:
        formats = ", ".join(SUFFIXES)
        raise UsageError(f"{stem}: use one of {formats}, or no suffix for all of them.")
    return [stem.with_suffix(suffix) for suffix in SUFFIXES]


def render(figure: Any, suffix: str) -> bytes:
    """Render a matplotlib figure to a file format, without a date.

    Args:
        figure: The figure.
        suffix: One of `SUFFIXES`.

    Returns:
        The file's content.
    """
    buffer = io.BytesIO()
    with matplotlib_style():
        figure.savefig(buffer, format=suffix[1:], metadata=_NO_DATE[suffix])
    return buffer.getvalue()


def save(figure: Any, files: list[Path]) -> None:
    """Write a figure to all files, or to none if one of them cannot be rendered.

    Args:
        figure: A matplotlib figure.
        files: The files; directories are created.
    """
    contents = [render(figure, file.suffix) for file in files]
    for file, data in zip(files, contents, strict=True):
        with explain_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, data)
