"""Files that somebody made to do harm: states whose hash is right and whose content is not."""

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
    """Change a state in place; where `change` gives something, that is the state now."""
    state = read_state(path, kind)
    changed = change(state)
    write_state(path, kind, state if changed is None else changed)


def opened(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the numbers of a safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def closed(header: dict[str, Any], numbers: bytes) -> bytes:
    """The file again."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + numbers


def rehashed(raw: bytes) -> bytes:
    """The file with the hash that belongs to its content; as it is where it cannot be read so far."""
    try:
        header, numbers = opened(raw)
        said = header["__metadata__"]
        said["sha256"] = saving._digest(said, load(raw))
        return closed(header, numbers)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return raw


def said(path: Path, **entries: str) -> None:
    """Change what a file says of itself, with a hash that fits."""
    header, numbers = opened(path.read_bytes())
    header["__metadata__"].update(entries)
    path.write_bytes(rehashed(closed(header, numbers)))
