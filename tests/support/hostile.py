"""Malicious files: states with a valid hash and invalid content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from steppe.checkpoint import io as saving
from steppe.checkpoint.io import read_state, write_state


def forged(path: Path, kind: str, change: Callable[[Any], Any]) -> None:
    """Change a state in place, or replace it with what `change` returns."""
    state = read_state(path, kind)
    changed = change(state)
    write_state(path, kind, state if changed is None else changed)


def opened(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def closed(header: dict[str, Any], numbers: bytes) -> bytes:
    """The file, rebuilt."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + numbers


def rehashed(raw: bytes) -> bytes:
    """The file with the correct hash for its content; unchanged if it cannot be parsed."""
    try:
        header, numbers = opened(raw)
        with_header = header["__metadata__"]
        with_header["sha256"] = saving._digest(with_header, load(raw))
        return closed(header, numbers)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return raw


def with_header(path: Path, **entries: str) -> None:
    """Change a file's metadata, and correct the hash."""
    header, numbers = opened(path.read_bytes())
    header["__metadata__"].update(entries)
    path.write_bytes(rehashed(closed(header, numbers)))
