"""Prints the results of the programs here, and writes them where `--out` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from steppe.runtime.environment import machine_info
from steppe.version import versions


def record(out: Path | None, **found: Any) -> None:
    """Print the results with the command, the versions and the machine, and write them to a file if one is given."""
    program = f"tests/stress/{Path(sys.argv[0]).name}"
    command = " ".join(["python", program, *sys.argv[1:]])
    text = json.dumps({"command": command, "versions": versions(), "machine": machine_info(), **found}, indent=1) + "\n"
    print(text, end="")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
