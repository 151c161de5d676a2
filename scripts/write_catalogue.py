"""Write what `steppe list` says to src/steppe/catalogue.json, from the methods and benchmarks themselves.

`--check` changes nothing and fails if the file is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from steppe.cli.catalogue import render_all

FILE = Path(__file__).parents[1] / "src" / "steppe" / "catalogue.json"


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the file is out of date")
    check = parser.parse_args().check
    text = json.dumps(render_all(), indent=1, ensure_ascii=False) + "\n"
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
        print("up to date")
        return 0
    if not check:
        FILE.write_text(text, encoding="utf-8")
    print(f"{FILE.name} is out of date" if check else f"wrote {FILE.name}")
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())
