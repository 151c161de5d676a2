"""The version, and what else identifies the code that produced a result."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of everything a number may depend on, and the commit where the code lies in a git checkout.

    torch, once it is loaded, knows more of itself than its package does: for which accelerator it was built.
    """
    found = {"steppe": __version__, "python": platform.python_version(), "platform": platform.system().lower()}
    found |= {package: metadata.version(package) for package in ("torch", "numpy")}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = str(torch.__version__)
    if commit := _commit():
        found["commit"] = commit
    return found


@functools.cache
def _commit() -> str | None:
    """The checkout's commit, marked where files that decide results differ from it; None outside a checkout."""
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
