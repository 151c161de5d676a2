"""Convert users' arrays and lists to tensors, and check that batches can be made from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from steppe.errors import DataError, one_line


def as_tensor(source: Any) -> Tensor:
    """Convert an array or list to a tensor; arrays that torch cannot share memory with are copied.

    Args:
        source: The array or list.

    Returns:
        The tensor.

    Raises:
        DataError: It cannot be converted, or has masked entries.
    """
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
            f"cannot be converted to tensors ({one_line(error).rstrip('.')}); pass arrays or tensors of numbers."
        ) from error


def check_unmasked(*parts: object) -> None:
    """DataError if arrays have masked entries, which a tensor would expose."""
    for part in parts:
        if isinstance(part, np.ma.MaskedArray) and (masked := int(np.ma.count_masked(part))):  # type: ignore[no-untyped-call]
            raise DataError(
                f"is a masked array with {masked:,} masked entries, which tensors cannot represent; fill them "
                "(array.filled(0)) or leave out the samples."
            )


def check_dense(*parts: Tensor) -> None:
    """DataError if batches cannot be cut from the tensors: sparse, nested, quantized, 8-bit float and meta tensors."""
    for part in parts:
        if part.is_nested or part.layout != torch.strided:
            kind = "nested" if part.is_nested else part.layout
            raise DataError(
                f"has a tensor that is {kind}; expected dense ones (use tensor.to_dense(), or pad sequences)."
            )
        if part.is_meta:
            raise DataError("has a tensor on the device 'meta', which has no values.")
        if part.is_quantized or (part.is_floating_point() and part.dtype.itemsize < 2):
            remedy = "tensor.dequantize()" if part.is_quantized else "tensor.half()"
            raise DataError(f"has numbers of type {part.dtype}, which torch only stores; convert them with {remedy}.")
