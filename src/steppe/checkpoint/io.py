"""State files: safetensors with the tree as JSON in the header, a version, and a hash of everything.

Reading one runs no code, and every fault of the file (truncated, a flipped bit, another format, a later version) is one
error that names it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from steppe.checkpoint.tree import State, flatten_tree, unflatten_tree
from steppe.errors import RunError, one_line, os_error_text
from steppe.runtime.files import explain_write_errors, parse_json, read_bounded, write_atomic

FORMAT, VERSION = "steppe", 1
_HEADER_ENTRIES = ("format", "kind", "version", "content", "sha256")


def write_state(path: Path, kind: str, tree: State) -> None:
    """Write a state file atomically, and read it back to check it.

    Args:
        path: The file.
        kind: What it contains, such as "learner" or "weights".
        tree: The state.

    Raises:
        RunError: The file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_state(Path(folder) / "run.safetensors", "run", {"epoch": 3})
        ...     read_state(Path(folder) / "run.safetensors", "run")
        {'epoch': 3}
    """
    content, tensors = flatten_tree(tree)
    own = {name: _cpu_copy(tensor) for name, tensor in tensors.items()}
    header = {"format": FORMAT, "kind": kind, "version": str(VERSION), "content": json.dumps(content)}
    written = save(own, metadata={**header, "sha256": _digest(header, own)})
    with explain_write_errors(path):
        write_atomic(path, written)
        if hashlib.sha256(path.read_bytes()).digest() != hashlib.sha256(written).digest():
            raise RunError(f"{path} differs from what was written to it; the disk is failing.")


def read_state(path: Path, kind: str, device: torch.device | str = "cpu") -> State:
    """Read a state file and check its hash.

    Args:
        path: The file.
        kind: What it must contain.
        device: Where to put the tensors.

    Returns:
        The state.

    Raises:
        RunError: The file is missing, damaged, of another kind or of another version.
    """
    try:
        data = read_bounded(path, None)
    except OSError as error:
        raise RunError(f"cannot read {path}: {os_error_text(error)}.") from error
    return parse_state(data, kind, path, device)


def parse_state(data: bytes, kind: str, name: Path | str, device: torch.device | str = "cpu") -> State:
    """Parse a state file's content, as `read_state` does; `name` names it in errors."""
    try:
        header, tensors = _header(data), load(data)
        if header.get("format") != FORMAT:
            if kind == "weights" and not header.keys() & set(_HEADER_ENTRIES):
                return _from_version_0(tensors, device)
            raise ValueError("it was not written by steppe")
        if header.get("version") != str(VERSION):
            raise ValueError(
                f"it has format version {header.get('version', '?')!r}, but this steppe reads version {VERSION}; use "
                "the steppe that wrote it, or a newer one"
            )
        if header.get("sha256") != _digest(header, tensors):
            raise ValueError("wrong hash: the file was changed or damaged")
        if header.get("kind") != kind:
            raise ValueError(f"it contains a {header.get('kind')}, not a {kind}")
        return unflatten_tree(parse_json(header["content"].encode()), tensors, device)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise RunError(f"{name} cannot be read: {one_line(error)}.") from error


def _from_version_0(tensors: Mapping[str, Tensor], device: torch.device | str) -> State:
    """Weights from before there was a version: a plain safetensors file."""
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def _header(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file, which `safetensors.torch.load` omits."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it is truncated or not a safetensors file")
    header = parse_json(data[8 : 8 + length])
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return metadata if isinstance(metadata, dict) else {}


def _digest(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A hash of the header and all tensors, independent of their order in the file."""
    total = hashlib.sha256()
    values = [header[entry] for entry in _HEADER_ENTRIES if entry != "sha256"]
    shapes = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in sorted(tensors)]
    total.update(json.dumps([values, shapes]).encode())
    for name in sorted(tensors):
        total.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _cpu_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU: safetensors cannot save tensors that share memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
