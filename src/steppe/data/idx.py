"""The IDX format of MNIST's publishers: a magic number, the dimensions, then bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from steppe.errors import DataError

_UNSIGNED_BYTE = 0x08


def parse_idx(raw: bytes, name: str) -> Tensor:
    """Parse an IDX file of unsigned bytes.

    Args:
        raw: The file's content.
        name: The file's name, for errors.

    Returns:
        The array.

    Raises:
        DataError: The content is not such a file.
    """
    if len(raw) < 4 or raw[0] or raw[1] or raw[2] != _UNSIGNED_BYTE:
        raise DataError(f"{name} is not an IDX file of unsigned bytes; download it again.")
    dimensions = raw[3]
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4)]
    if dimensions == 0 or len(raw) != start + math.prod(shape):
        raise DataError(f"{name} declares shape {shape} but has {len(raw) - start} bytes; download it again.")
    if len(raw) == start:
        raise DataError(f"{name} is empty: it declares shape {shape}; download it again.")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).reshape(shape)
