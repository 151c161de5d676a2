"""Where the data sets lie that the package does not carry: one directory for all of them."""

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
    """The directory that STEPPE_DATA names, else one in the user's cache; it need not be there yet."""
    named = os.environ.get(VARIABLE)
    return expand_path(named).absolute() if named else user_cache_path("steppe") / "data"


def missing_error(title: str, name: str) -> DataError:
    """The error for a data set that is not in the directory."""
    return DataError(
        f"{title} is not in {data_directory()}: run `steppe data fetch {name}`, "
        f"or say with --data or {VARIABLE} where it is."
    )


def set_data_directory(directory: Path | None, *, create: bool = False) -> None:
    """Make this the data directory of the process and of those it starts; None leaves it as it is.

    It goes through the environment so that no path of one machine gets into a run's configuration.
    """
    if directory is None:
        return
    if not directory.is_dir() and (directory.exists() or not create):
        raise UsageError(f"--data {directory}: there is no such directory.")
    os.environ[VARIABLE] = str(directory.absolute())


@contextmanager
def explain_storage_errors(path: Path) -> Iterator[None]:
    """Turn what the disk refuses while data is stored into an error that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = f"fix that, or choose another directory with --data or {VARIABLE}"
        raise DataError(f"cannot write {path}: {os_error_text(error)}; {remedy}.") from error
