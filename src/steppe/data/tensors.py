"""Tensors of what users give: arrays and lists made tensors, and what no batch can be cut from refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from steppe.errors import DataError, one_line


def as_tensor(source: Any) -> Tensor:
    """A tensor of a tensor, an array or a list; arrays that torch cannot share memory with are copied."""
    check_unmasked(source)
    if isinstance(source, np.ndarray):
        if not source.dtype.isnative:
            source = source.astype(source.dtype.newbyteorder("="))
        if any(stride < 0 for stride in source.strides):
            source = source.copy()
    try:
        return torch.as_tensor(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"cannot be made tensors: {one_line(error).rstrip('.')}: give arrays or tensors of numbers."
        ) from error


def check_unmasked(*parts: object) -> None:
    """Refuse arrays some of whose entries are masked: a tensor has no mask, and would show what lies behind it."""
    for part in parts:
        if isinstance(part, np.ma.MaskedArray) and (masked := int(np.ma.count_masked(part))):  # type: ignore[no-untyped-call]
            raise DataError(
                f"is a masked array, of whose entries {masked:,} are masked, and tensors have no masks: put numbers in "
                "their place (array.filled(0)), or leave the samples out."
            )


def check_dense(*parts: Tensor) -> None:
    """Refuse tensors of which batches cannot be cut or put together: sparse and nested ones, those of a type that is
    only for storing, and those without values.
    """
    for part in parts:
        if part.is_nested or part.layout != torch.strided:
            kind = "nested" if part.is_nested else part.layout
            raise DataError(
                f"holds a tensor that is {kind}: give dense ones (of sparse tensors: tensor.to_dense(); of sequences: "
                "pad them)."
            )
        if part.is_meta:
            raise DataError("holds a tensor on the device 'meta', which has no values: give it with values.")
        if part.is_quantized or (part.is_floating_point() and part.dtype.itemsize < 2):
            remedy = "tensor.dequantize()" if part.is_quantized else "tensor.half()"
            raise DataError(f"holds numbers of type {part.dtype}, which are for storing alone: give {remedy} of them.")
