"""Files that hold a state: safetensors with a JSON tree in the header, a version, and a hash over everything.

Reading one executes nothing, and whatever is wrong with the file (cut short, a flipped bit, another format, a version
from the future) is one error that names it.
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
    """Write a state so that the file is there whole or not at all, and look whether it arrived."""
    content, tensors = flatten_tree(tree)
    own = {name: _cpu_copy(tensor) for name, tensor in tensors.items()}
    header = {"format": FORMAT, "kind": kind, "version": str(VERSION), "content": json.dumps(content)}
    written = save(own, metadata={**header, "sha256": _digest(header, own)})
    with explain_write_errors(path):
        write_atomic(path, written)
        if hashlib.sha256(path.read_bytes()).digest() != hashlib.sha256(written).digest():
            raise RunError(f"{path} does not hold what was written to it: the disk is failing.")


def read_state(path: Path, kind: str, device: torch.device | str = "cpu") -> State:
    """Read a state of the kind, checked by its hash."""
    try:
        data = read_bounded(path, None)
    except OSError as error:
        raise RunError(f"cannot read {path}: {os_error_text(error)}.") from error
    return parse_state(data, kind, path, device)


def parse_state(data: bytes, kind: str, name: Path | str, device: torch.device | str = "cpu") -> State:
    """The state that a file's bytes hold."""
    try:
        header, tensors = _header(data), load(data)
        if header.get("format") != FORMAT:
            if kind == "weights" and not header.keys() & set(_HEADER_ENTRIES):
                return _from_version_0(tensors, device)
            raise ValueError("it was not written by steppe")
        if header.get("version") != str(VERSION):
            raise ValueError(
                f"it has version {header.get('version', '?')!r} of the format, and this steppe reads version "
                f"{VERSION}: use the steppe that wrote it, or a newer one"
            )
        if header.get("sha256") != _digest(header, tensors):
            raise ValueError("its hash is wrong: the file was changed or damaged")
        if header.get("kind") != kind:
            raise ValueError(f"it holds a {header.get('kind')}, not a {kind}")
        return unflatten_tree(parse_json(header["content"].encode()), tensors, device)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise RunError(f"{name} cannot be read: {one_line(error)}.") from error


def _from_version_0(tensors: Mapping[str, Tensor], device: torch.device | str) -> State:
    """Weights as they were kept before there was a version: their names and nothing else."""
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def _header(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file, which its reader for bytes leaves out."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it is cut short or no safetensors file")
    header = parse_json(data[8 : 8 + length])
    found = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return found if isinstance(found, dict) else {}


def _digest(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A hash of everything that is said and held, in an order that does not depend on the file's."""
    total = hashlib.sha256()
    said = [header[entry] for entry in _HEADER_ENTRIES if entry != "sha256"]
    shapes = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in sorted(tensors)]
    total.update(json.dumps([said, shapes]).encode())
    for name in sorted(tensors):
        total.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _cpu_copy(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in memory of its own: tensors that share memory cannot be saved by a name each."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
