"""One memory in all processes of a distributed run: each would have its own, as each sees other samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_DTYPES = (torch.float32, torch.float64, torch.int64)
_HEADER = 6  # number type, number of dimensions, and up to four sizes


def broadcast_tensors(
    tensors: Mapping[str, Sequence[Tensor]], weights: Mapping[str, Tensor], group: Any
) -> dict[str, list[Tensor]]:
    """Replace tensors by those of the group's first process.

    Args:
        tensors: Pairs of tensors for some of the weights, by name. Which ones, and of which shapes, may differ between
            processes.
        weights: Weights of the same names in all processes; the tensors lie on their devices.
        group: The processes.

    Returns:
        The first process's tensors.
    """
    source, received = dist.get_global_rank(group, 0), {}
    for name, weight in weights.items():
        own = list(tensors.get(name, ()))
        headers = torch.tensor([_header(t) for t in own] or [[-1] * _HEADER] * 2, device=weight.device)
        dist.broadcast(headers, source, group)
        rows = headers.tolist()
        if rows[0][0] < 0:
            continue
        if dist.get_rank(group) != 0:
            own = [torch.empty(r[2 : 2 + r[1]], dtype=_DTYPES[r[0]], device=weight.device) for r in rows]
        received[name] = [t.contiguous() for t in own]
        for tensor in received[name]:
            dist.broadcast(tensor, source, group)
    return received


def group_of(model: nn.Module) -> Any:
    """The process group of a `DistributedDataParallel` model; None for others."""
    model = getattr(model, "_orig_mod", model)  # a compiled one
    return model.process_group if isinstance(model, nn.parallel.DistributedDataParallel) else None


def _header(tensor: Tensor) -> list[int]:
    sizes = [*tensor.shape]
    return [_DTYPES.index(tensor.dtype), len(sizes), *sizes, *[0] * (_HEADER - 2 - len(sizes))]
