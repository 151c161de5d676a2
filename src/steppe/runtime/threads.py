"""How many of torch's threads a model's work is spread over.

Each operation that is spread over threads has to wait for all of them. On a busy machine that is slow: a hundred small
updates took 1.1 s with one thread and 130 s with two. So small models run on one thread. What is small is computed from
the layers' sizes, not measured, because results depend on the number of threads in their last bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from steppe.runtime.hooks import temporary_hooks

SINGLE_THREAD_LIMIT = 2**27
"""Multiplications in a batch's forward up to which one thread is used: about 10 ms of one core."""
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd)
_LOCK = threading.Lock()


def choose_num_threads(multiplications: int, batch: int) -> int:
    """The number of threads for batches of a given size.

    Args:
        multiplications: Multiplications in one sample's forward, from `count_multiplications`.
        batch: Samples in a batch.

    Returns:
        1 for small work, else torch's current number.
    """
    return 1 if multiplications * batch <= SINGLE_THREAD_LIMIT else torch.get_num_threads()


def count_multiplications(model: nn.Module, run: Callable[[], object], samples: int) -> int:
    """Count the multiplications in one sample's forward pass.

    Each weight counts once for each position that its layer is applied to, and at least once, as a model may use
    weights outside its layers.

    Args:
        model: The model.
        run: Runs the model once.
        samples: On how many samples it does.

    Returns:
        The number of multiplications.
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
                run()
        except (RuntimeError, ValueError, TypeError, IndexError):
            counted = 0  # the model rejects these inputs: reported where they are used
    return max(counted // max(samples, 1), least)


def set_num_threads(count: int) -> int:
    """Let operations of the calling thread use `count` threads.

    torch keeps this number per thread, plus a default for new threads, which `torch.set_num_threads` sets as well. Here
    the default stays: a helper thread that started with it puts it back.

    Args:
        count: The number of threads.

    Returns:
        The previous number.
    """
    before = torch.get_num_threads()
    if before == count:
        return before
    known, changed = threading.Lock(), threading.Lock()
    known.acquire()
    changed.acquire()

    def restore_default() -> None:
        default = torch.get_num_threads()
        known.release()
        changed.acquire()
        torch.set_num_threads(default)

    with _LOCK:
        helper = threading.Thread(target=restore_default, daemon=True)
        helper.start()
        known.acquire()
        try:
            torch.set_num_threads(count)
        finally:
            changed.release()
        helper.join()
    return before
