"""Devices: which ones are supported, copies to them, and deterministic computation on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.errors import UsageError, short_repr, unknown_name

DEVICES = ("auto", "cpu", "cuda")
"""What commands and configurations accept."""


def check_device(device: object) -> None:
    """Check that a device is supported and available; None is the model's own device.

    Raises:
        UsageError: It is not a device, not supported, or not available here.
    """
    if device is None:
        return
    try:
        parsed = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"unknown device {short_repr(device)}: use 'cpu' or 'cuda'.") from error
    if parsed.type not in DEVICES:
        raise UsageError(
            f"device {device} is not supported: learning needs double precision and random number generators whose "
            "state can be saved; use 'cpu' or 'cuda'."
        )
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device {device}: CUDA is not available on this machine or in this build of torch; use 'cpu'."
        )
    if parsed.index is not None and parsed.type == "cuda" and parsed.index >= torch.cuda.device_count():
        raise UsageError(
            f"no such device {device}: this machine has {torch.cuda.device_count()} CUDA device(s), numbered from 0."
        )


def resolve_device(name: str) -> str:
    """Resolve the name of a device.

    Args:
        name: The name; `auto` is CUDA if available, else the CPU.

    Returns:
        The device's name.

    Raises:
        UsageError: The name is unknown, or CUDA is not available.
    """  # noqa: DOC501
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda: this machine or this build of torch has no CUDA; use --device cpu or auto.")
    return name


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting. A copy to the CPU is waited for: it could be read before it has arrived."""
    return x.to(device, non_blocking=device.type != "cpu")


def make_deterministic(device: str) -> None:
    """Make the process compute the same numbers on the device every time, with convolutions in full float32. By default
    cuDNN picks kernels that sum in any order and round inputs to TF32.
    """
    if torch.device(device).type == "cuda":
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
