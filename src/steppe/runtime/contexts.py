"""State of the process that an update wants otherwise, changed for a while and given back; lengths kept in bounds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Numbers too small to matter count as zero inside.

    Momentum of inputs that are always zero decays into denormals, which slow a step of the MLP nearly twofold.
    """
    found = _flushing()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(found)


class Shared:
    """State of the whole process that work wants otherwise: changed by the first thread that begins, given back by the
    last one that ends, however their times overlap.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock, self._users = threading.Lock(), 0
        self._undo: Callable[[], None] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Changed inside."""
        counted = False
        try:
            with self._lock:
                if self._undo is None:
                    self._undo = self._change()
                self._users, counted = self._users + 1, True
            yield
        finally:
            with self._lock:
                self._users -= counted
                if self._users == 0 and self._undo is not None:
                    undo, self._undo = self._undo, None
                    undo()


def _freeze() -> Callable[[], None]:
    if gc.get_freeze_count():  # the program's own, which nobody may undo
        return lambda: None
    gc.freeze()
    return gc.unfreeze


gc_frozen = Shared(_freeze)
"""What is loaded by now is not walked through by Python's garbage collector inside.

Updates make many small objects, so it runs often; with torch loaded its walks take a twelfth of a small update.
"""


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Inside, autocast keeps no copies of weights: around whole updates, it would go on with those of the first."""
    found = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(found)


@contextmanager
def neutral_autograd(device: torch.device) -> Iterator[None]:
    """Inside, the caller's own inference mode and autocast do not count: precision is the network's business."""
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def training_context(device: torch.device) -> Iterator[None]:
    """The process as updates want it, whatever their caller has set for himself."""
    with neutral_autograd(device), torch.enable_grad(), flush_denormals(), no_autocast_cache():
        yield


def _attention_written_out() -> Callable[[], None]:
    kept = ExitStack()
    kept.enter_context(sdpa_kernel(SDPBackend.MATH))
    return kept.close


def _recurrence_written_out() -> Callable[[], None]:
    found, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False

    def undo() -> None:
        torch.backends.cudnn.enabled = found

    return undo


_ATTENTION, _RECURRENCE = Shared(_attention_written_out), Shared(_recurrence_written_out)


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """The model's forwards inside can be differentiated twice: the quick kernels of attention, and of recurrent layers
    on CUDA, have one derivative only.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with _ATTENTION(), _RECURRENCE() if recurrent else nullcontext():
        yield


def _flushing() -> bool:
    """Whether denormals are flushed now; torch can set it but not tell it."""
    smallest = torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64, device="cpu")
    return not bool(smallest / 2)


def clip_ratio(length: float, bound: float) -> float:
    """By what something of this length must be multiplied to be no longer than the bound; 1 at most."""
    factor = bound / (length + 1e-6)
    return factor if factor < 1.0 else 1.0


def clip_ratio_tensor(length: Tensor, bound: float) -> Tensor:
    """The same for a length that is still on its device, which nobody has to wait for."""
    return (bound / (length + 1e-6)).clamp(max=1.0)
