"""The kind of inputs that a learner learns from, and which others are not meant."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.errors import DataError
from steppe.network.network import Network

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a task's inputs."""


def check_scaled_alike(x: Tensor, kind: Kind, network: Network) -> None:
    """Refuse bytes where numbers were learnt from, or the reverse, if bytes are scaled by us."""
    if (x.dtype == torch.uint8) != (kind[1] == torch.uint8) and network.inputs.scales_bytes:
        raise DataError(
            f"are {x.dtype}, those that were learnt from {kind[1]}, and only bytes are scaled to 0…1: give both alike."
        )
