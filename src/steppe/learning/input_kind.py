"""The kind of inputs that a learner is trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.errors import DataError
from steppe.network.network import Network

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape of a sample and type of a task's inputs."""


def check_scaled_alike(x: Tensor, kind: Kind, network: Network) -> None:
    """Raise DataError if only one of the inputs and the kind trained on is bytes, and bytes are scaled by default."""
    if (x.dtype == torch.uint8) != (kind[1] == torch.uint8) and network.inputs.scales_bytes:
        raise DataError(
            f"are {x.dtype}, but the model was trained on {kind[1]}, and only bytes are scaled to 0…1; "
            "use the same type."
        )
