"""State of the process that an update wants otherwise, changed for a while and given back; lengths kept in bounds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from steppe.devices import recurrence_unfused


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Numbers too small to matter count as zero inside.

    Momentum of inputs that are always zero decays into denormals, which slow a step of the MLP nearly twofold.
    """
    found = _flushing()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(found)


@contextmanager
def loaded_left_alone() -> Iterator[None]:
    """What is loaded by now is not walked through by Python's garbage collector inside.

    Updates make many small objects, so it runs often; with torch loaded its walks take a twelfth of a small update.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def casts_made_anew() -> Iterator[None]:
    """Inside, autocast keeps no copies of weights: around whole updates, it would go on with those of the first."""
    found = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(found)


@contextmanager
def unswayed(device: torch.device) -> Iterator[None]:
    """Inside, the caller's own inference mode and autocast do not count: precision is the network's business."""
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def learning(device: torch.device) -> Iterator[None]:
    """The process as updates want it, whatever their caller has set for himself."""
    with unswayed(device), torch.enable_grad(), denormals_flushed(), casts_made_anew():
        yield


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """The model's forwards inside can be differentiated twice: the quick kernels of attention, and of recurrent layers
    on CUDA, have one derivative only.
    """
    with sdpa_kernel(SDPBackend.MATH), recurrence_unfused(model):
        yield


def _flushing() -> bool:
    """Whether denormals are flushed now; torch can set it but not tell it."""
    smallest = torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64, device="cpu")
    return not bool(smallest / 2)


def shortening(length: float, bound: float) -> float:
    """By what something of this length must be multiplied to be no longer than the bound; 1 at most."""
    factor = bound / (length + 1e-6)
    return factor if factor < 1.0 else 1.0


def shortening_tensor(length: Tensor, bound: float) -> Tensor:
    """The same for a length that is still on its device, which nobody has to wait for."""
    return (bound / (length + 1e-6)).clamp(max=1.0)
