"""steppe: train a PyTorch network on a sequence of tasks without forgetting the earlier ones.

The public names are listed in `steppe.api`, which is imported on first use: `steppe --help` should not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from steppe.version import __version__ as __version__

if TYPE_CHECKING:
    from steppe.api import *  # noqa: F403
    from steppe.api import __all__ as __all__


def __getattr__(name: str) -> object:
    if name == "__all__" or not name.startswith("_"):
        api = importlib.import_module("steppe.api")
        if name == "__all__" or name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'steppe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})  # type: ignore[misc]
