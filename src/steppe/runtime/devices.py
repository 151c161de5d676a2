"""Devices: which are served, how tensors get there, and what CUDA's libraries are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from steppe.errors import UsageError, short_repr, unknown_name

DEVICES = ("auto", "cpu", "cuda")
"""What commands and configurations may name."""


def check_device(device: object) -> None:
    """Refuse a device that is not served or not there; None is the model's own."""
    if device is None:
        return
    try:
        found = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {short_repr(device)} is unknown: give 'cpu' or 'cuda'.") from error
    if found.type not in DEVICES:
        raise UsageError(
            f"device {device}: learning needs double precision and random numbers that can be kept, which are had on "
            "'cpu' and 'cuda' only; give one of them."
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device}: this machine or this build of torch has no CUDA; use 'cpu'.")
    if found.index is not None and found.type == "cuda" and found.index >= torch.cuda.device_count():
        raise UsageError(f"device {device}: this machine has {torch.cuda.device_count()} of them, counted from 0.")


def resolve_device(name: str) -> str:
    """The device by name, `auto` being CUDA where there is one; a device that is not there is refused."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda: this machine or this build of torch has none; use --device cpu or auto.")
    return name


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """On the device, not waited for where nothing can come too early. A copy from there to the CPU must be: whoever
    reads it could be quicker than the copy.
    """
    return x.to(device, non_blocking=device.type != "cpu")


def make_deterministic(device: str) -> None:
    """From now on this process computes on the device with the same numbers every time, and convolutions in the
    precision that is asked for: left alone, they take kernels whose sums come in any order, and round their inputs.
    """
    if torch.device(device).type == "cuda":
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False


@contextmanager
def without_fused_rnn(model: nn.Module) -> Iterator[None]:
    """Inside, recurrent layers can be differentiated in eval mode, too, and twice: those of cuDNN cannot."""
    found = torch.backends.cudnn.enabled
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = found
