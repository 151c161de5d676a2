"""What a gradient memory tells its user: saturated weights, empty bases, weights that do not go together."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from steppe.errors import ModelError
from steppe.runtime.warn import Caution


def saturation_remark(name: str, directions: int) -> Caution:
    """The remark on a weight that can no longer learn."""
    return Caution(
        f"the basis of {name!r} holds all {directions} directions of its inputs, so this weight can no longer "
        "learn. For the next model, lower the threshold or its step per task, soften the projection (method "
        f"sgp, or importance='spectral'), widen the layer, or leave it unprotected with exclude=({name!r},)."
    )


def empty_basis_remark(name: str, threshold: float) -> str:
    """The remark on a weight that is left without a basis."""
    return (
        f"the basis of {name!r} is empty, so this weight is not protected: a single direction holds more than the "
        f"threshold's share of its inputs, {threshold:g}, and the first task leaves out the direction that crosses the "
        "threshold. Raise the threshold, or center the inputs around 0."
    )


def require_one_kind(kinds: Mapping[str, tuple[torch.dtype, torch.device]]) -> None:
    """Reject covered weights of several types or on several devices, since λ of all of them is one tensor."""
    first = next(iter(kinds), "")
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise ModelError(
                "the covered weights are of several types, or on several devices "
                f"({first!r} is {_describe_kind(kinds[first])}, {name!r} {_describe_kind(kind)}), but their "
                "importances are updated together: make the weights alike (model.float()), leave some out with "
                "exclude=(...), or set importance to ones or spectral."
            )


def _describe_kind(kind: tuple[torch.dtype, torch.device]) -> str:
    return f"{kind[0]} on {kind[1]}"
