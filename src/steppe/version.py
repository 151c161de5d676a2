"""The version, and everything else that identifies the code behind a result."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions a result may depend on, and the commit if the code is in a git checkout.

    Once torch is imported, its version includes the accelerator it was built for, as in 2.6.0+cu124.
    """
    numbers = {"steppe": __version__, "python": platform.python_version(), "platform": platform.system().lower()}
    numbers |= {package: metadata.version(package) for package in ("torch", "numpy")}
    if (torch := sys.modules.get("torch")) is not None:
        numbers["torch"] = str(torch.__version__)
    if commit := _commit():
        numbers["commit"] = commit
    return numbers


@functools.cache
def _commit() -> str | None:
    """Return the commit, marked "+changes" if the source differs from it; None outside a git checkout."""
    source = Path(__file__).parent
    if not (source.parents[1] / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--", "."], cwd=source, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
