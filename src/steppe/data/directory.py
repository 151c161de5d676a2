"""Where the data sets lie that the package does not carry: one directory for all of them."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

from steppe.errors import DataError

VARIABLE = "STEPPE_DATA"


def data_directory() -> Path:
    """The directory that STEPPE_DATA names, else one in the user's cache; it need not be there yet."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else user_cache_path("steppe") / "data"


def missing(title: str, name: str) -> DataError:
    """The error for a data set that is not in the directory."""
    return DataError(
        f"{title} is not in {data_directory()}: run `steppe data fetch {name}`, "
        f"or say with --data or {VARIABLE} where it is."
    )
