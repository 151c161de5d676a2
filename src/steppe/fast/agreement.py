"""The check that every fast path passes before it is used: on a small batch it computes what autograd computes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def agree(fast: Tensor, slow: Tensor) -> bool:
    """Whether two results are the same to within half the digits of their precision; NaN or infinity never is."""
    tolerance = math.sqrt(torch.finfo(slow.dtype).eps)
    error, size = torch.linalg.vector_norm(fast - slow), torch.linalg.vector_norm(slow)
    return bool(error <= tolerance * (size + tolerance))
