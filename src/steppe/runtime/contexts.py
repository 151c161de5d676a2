"""Context managers for process-wide state that an update needs to be different: denormals, autocast, garbage
collection, attention and RNN kernels.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_FLUSHING = threading.local()  # the setting that each thread's outermost `flush_denormals` found


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Treat denormal numbers as zero inside.

    Momentum of inputs that are always zero decays into denormals, which make an update of the MLP nearly twice as slow.
    """
    before, is_outermost = _flushes_denormals(), getattr(_FLUSHING, "before", None) is None
    try:
        if is_outermost:
            _FLUSHING.before = before
        torch.set_flush_denormal(True)
        yield
    finally:
        torch.set_flush_denormal(before)
        if is_outermost:
            _FLUSHING.before = None


def restore_denormals() -> None:
    """Restore the setting if an exception from another thread interrupted `flush_denormals` in this thread."""
    before = getattr(_FLUSHING, "before", None)
    if before is not None:
        torch.set_flush_denormal(before)
        _FLUSHING.before = None


class SharedOverride:
    """A change to state of the whole process that several threads can have in effect at once: the first one that enters
    makes it, the last one that leaves undoes it.

    Args:
        change: Makes the change and returns a function that undoes it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock, self._users = threading.Lock(), 0
        self._undo: Callable[[], None] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Apply the change inside."""
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
    if gc.get_freeze_count():  # frozen by the program itself, which also unfreezes it
        return lambda: None
    gc.freeze()
    return gc.unfreeze


gc_frozen = SharedOverride(_freeze)
"""Keeps Python's garbage collector from scanning what is loaded already.

Updates create many small objects, so that it runs often; with torch loaded, its scans take a twelfth of a small update.
"""


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Disable autocast's cache of cast weights inside: around a whole update it would keep serving the old weights."""
    before = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def neutral_autograd(device: torch.device) -> Iterator[None]:
    """Disable the caller's inference mode and autocast inside: the network chooses its own precision."""
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def training_context(device: torch.device) -> Iterator[None]:
    """The process state that updates need, whatever the caller has set."""
    with neutral_autograd(device), torch.enable_grad(), flush_denormals(), no_autocast_cache():
        yield


def _use_math_attention() -> Callable[[], None]:
    stack = ExitStack()
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    return stack.close


def _disable_cudnn() -> Callable[[], None]:
    before, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False

    def undo() -> None:
        torch.backends.cudnn.enabled = before

    return undo


_MATH_ATTENTION, _NO_CUDNN = SharedOverride(_use_math_attention), SharedOverride(_disable_cudnn)


@contextmanager
def without_fused_rnn(model: nn.Module) -> Iterator[None]:
    """Run recurrent layers without cuDNN inside: its kernels have one derivative, and in train mode only."""
    with ExitStack() as stack:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(_NO_CUDNN())
        yield


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Run the model's forwards inside on kernels with a second derivative, which the fused kernels of attention, and of
    recurrent layers on CUDA, lack.
    """
    with _MATH_ATTENTION(), without_fused_rnn(model):
        yield


def _flushes_denormals() -> bool:
    """Whether denormals are flushed now; torch has no getter."""
    smallest = torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64, device="cpu")
    return not bool(smallest / 2)
