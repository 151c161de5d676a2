"""How many of torch's threads a model's work is spread over.

Spreading costs a meeting of all threads at every operation, and where another program has the cores each meeting waits
for it: a hundred small updates took 1.1 s with one thread, and 130 s with two on a busy machine. So the work of small
models stays on one thread. What is small is counted, not measured, as results depend on the number in their last bits.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from steppe.runtime.hooks import temporary_hooks

SMALL = 2**27
"""Multiplications of a batch's forward up to which one thread does it: some 10 ms of a core's time."""
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd)
_CHANGING = threading.Lock()


def suited(to_dense: int, batch: int) -> int:
    """How many threads suit batches of samples each of which takes so many multiplications: one for small work, torch's
    own number for other.
    """
    return 1 if to_dense * batch <= SMALL else torch.get_num_threads()


def multiplications(model: nn.Module, prepared: Tensor) -> int:
    """How often a forward multiplies for each of a few prepared samples: every weight once for each place where its
    layer is applied, and all weights once at the least, as a model may use them otherwise than by its layers.
    """
    counted, least = 0, sum(weight.numel() for weight in model.parameters())

    def count(layer: nn.Module, _: object, output: object) -> None:
        nonlocal counted
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1 and isinstance(output, Tensor):
            counted += output.numel() * weight[0].numel()

    with temporary_hooks() as hooks:
        for layer in model.modules():
            if isinstance(layer, _LAYERS):
                hooks.append(layer.register_forward_hook(count))
        try:
            with torch.no_grad():
                model(prepared.clone())  # it may work in place
        except (RuntimeError, ValueError, TypeError, IndexError):
            counted = 0  # the model does not take them, which is said where they are used
    return max(counted // max(len(prepared), 1), least)


def use_threads(count: int) -> int:
    """Let this thread's operations be spread over so many from now on; returns the number so far.

    torch keeps the number for each thread, and beside it the one that threads begin with. That one is left as it is:
    a thread that comes and goes meanwhile puts it back.
    """
    found = torch.get_num_threads()
    if found == count:
        return found
    known, changed = threading.Lock(), threading.Lock()
    known.acquire()
    changed.acquire()

    def keep() -> None:
        first = torch.get_num_threads()
        known.release()
        changed.acquire()
        torch.set_num_threads(first)

    with _CHANGING:
        keeper = threading.Thread(target=keep, daemon=True)
        keeper.start()
        known.acquire()
        try:
            torch.set_num_threads(count)
        finally:
            changed.release()
        keeper.join()
    return found
