"""`steppe.load`: a learner from the file that `Learner.save` wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from steppe.checkpoint.io import read_state
from steppe.checkpoint.tree import INVALID_STATE_ERRORS, State
from steppe.errors import RunError, UsageError, one_line
from steppe.learning.learner import Learner
from steppe.methods.base import MethodConfig
from steppe.network.module_state import undoing
from steppe.registry import METHODS
from steppe.runtime.devices import check_device


def load(
    path: Path | str,
    model: nn.Module,
    *,
    device: str | torch.device | None = None,
    input_transform: Callable[[Tensor], Tensor] | None = None,
    threads: int | None = None,
) -> Learner:
    """The learner that was saved, at work on `model`, whose weights are replaced by the saved ones.

    The file holds numbers and names, no code: a model of the same architecture, with the same weights frozen, and the
    same `input_transform`, where there was one, come from the caller. A method of one's own must be registered before.
    `threads` are those that were chosen when the learner was made, unless others are given.
    """
    check_device(device)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}: give a torch.nn.Module like the one that was saved.")
    with torch.inference_mode(False):  # whoever loads in it may learn outside of it
        return _loaded(Path(path), model, device, input_transform, threads)


def _loaded(
    path: Path,
    model: nn.Module,
    device: str | torch.device | None,
    prepare: Callable[[Tensor], Tensor] | None,
    threads: int | None,
) -> Learner:
    place = device if device is not None else next((p.device for p in model.parameters()), "cpu")
    state = read_state(path, "learner", place)
    undo: Callable[[], None] | None = None
    try:
        settings, seed, exclude = _settings(state["settings"]), state["seed"], state["exclude"]
        threads = state.get("threads") if threads is None else threads  # older files do not say
        learner = Learner(
            model, settings, seed=seed, device=device, input_transform=prepare, exclude=exclude, threads=threads
        )
        undo = undoing(model)
        learner.load_state_dict(state)
    except Exception as error:
        if undo is not None:
            undo()
        if not isinstance(error, INVALID_STATE_ERRORS):
            raise
        told = f"{type(error).__name__}: {one_line(error)}"
        raise RunError(f"{path} holds no learner that can be gone on with: {told}.") from error
    return learner


def _settings(saved: State) -> MethodConfig:
    for entry in METHODS.values():
        if entry.settings.__name__ == saved["kind"]:
            found = entry.settings.from_mapping(saved["values"])
            assert isinstance(found, MethodConfig)
            return found
    raise UsageError(f"the learner was saved with the method {saved['kind']}, which is not known: register it first.")
