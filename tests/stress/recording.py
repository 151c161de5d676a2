"""The options that the programs here share; prints their results, and writes them where `--out` says."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from steppe.runtime.environment import machine_info
from steppe.version import versions


def option_parser(text: str | None, seed_of: str | None = None) -> argparse.ArgumentParser:
    """A parser of `--out`, and of `--seed` if it decides anything."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if seed_of is not None:
        parser.add_argument("--seed", type=int, default=0, metavar="N", help=f"seed of {seed_of} (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to this file as well")
    return parser


def record(out: Path | None, **found: Any) -> None:
    """Print the results with the command, the versions and the machine, and write them to a file if one is given."""
    program = f"tests/stress/{Path(sys.argv[0]).name}"
    command = " ".join(["python", program, *sys.argv[1:]])
    text = json.dumps({"command": command, "versions": versions(), "machine": machine_info(), **found}, indent=1) + "\n"
    print(text, end="")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
