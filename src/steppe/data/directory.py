"""The data directory, where downloaded data sets are stored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from steppe.errors import DataError, UsageError, os_error_text
from steppe.runtime.files import expand_path

VARIABLE = "STEPPE_DATA"


def data_directory() -> Path:
    """The directory in STEPPE_DATA, else one in the user's cache; it may not exist yet."""
    named = os.environ.get(VARIABLE)
    return expand_path(named).absolute() if named else user_cache_path("steppe") / "data"


def missing_error(title: str, name: str) -> DataError:
    """The error for a data set that is not in the directory."""
    return DataError(
        f"{title} is not in {data_directory()}: run `steppe data fetch {name}`, "
        f"or point to it with --data or {VARIABLE}."
    )


def set_data_directory(directory: Path | None, *, create: bool = False) -> None:
    """Set the data directory of this process and its children, through the environment: a run's configuration has no
    paths of one machine.

    Args:
        directory: The directory; None changes nothing.
        create: Whether it may be missing, to be created later.

    Raises:
        UsageError: It does not exist or is not a directory.
    """
    if directory is None:
        return
    if not directory.is_dir() and (directory.exists() or not create):
        raise UsageError(f"--data {directory}: no such directory.")
    os.environ[VARIABLE] = str(directory.absolute())


@contextmanager
def explain_storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = f"fix that, or choose another directory with --data or {VARIABLE}"
        raise DataError(f"cannot write {path}: {os_error_text(error)}; {remedy}.") from error
