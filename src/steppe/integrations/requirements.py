"""The error for a library that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from steppe.errors import UsageError


def require(feature: str, module: str, extra: str) -> None:
    """Check that an optional library is installed, without importing it.

    Args:
        feature: What needs it, for the error message.
        module: The module that must be found.
        extra: The extra of steppe that installs it.

    Raises:
        UsageError: It is not installed.
    """
    package, _, _ = module.partition(".")
    if find_spec(package) is None or find_spec(module) is None:
        raise UsageError(f"{feature} needs {extra}: pip install 'steppe[{extra}]'.")
