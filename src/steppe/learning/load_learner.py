"""`steppe.load`: reads the file that `Learner.save` wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steppe.checkpoint.io import read_state
from steppe.checkpoint.tree import INVALID_STATE_ERRORS, State
from steppe.data.padding import Padding
from steppe.errors import RunError, UsageError, one_line
from steppe.learning.learner import Learner
from steppe.learning.scoring import Metric
from steppe.methods.base import MethodConfig
from steppe.network.module_state import undoing
from steppe.network.optimizer_choice import OptimizerFactory, SchedulerFactory
from steppe.network.output_loss import Loss
from steppe.registry import METHODS
from steppe.runtime.devices import check_device


def load(
    path: Path | str,
    model: nn.Module,
    *,
    device: str | torch.device | None = None,
    input_transform: Callable[[Any], Any] | None = None,
    threads: int | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    keep_optimizer_state: bool = False,
) -> Learner:
    """Load a learner that `Learner.save` wrote.

    The file holds numbers and names, no code. A method of your own must be registered first.

    Args:
        path: The file.
        model: A model of the same architecture, with the same weights frozen. Its weights are replaced by the saved
            ones. If the learner was created with `grow=True`, the output layer grows to its saved size.
        device: Where to move the model; by default it stays where it is.
        input_transform: The same function as when the learner was created, if it had one.
        threads: How many threads to use; by default as chosen when the learner was created.
        loss: The same loss as when the learner was created, if it had one.
        metric: What `evaluate` measures; by default accuracy.
        optimizer: Makes the optimizer, as for `Learner`. Between two tasks it may be another one than before; a learner
            that was saved without may get one.
        scheduler: Makes the scheduler, as for `Learner`.
        keep_optimizer_state: As for `Learner`; another optimizer starts anew.

    Returns:
        The learner. If it was saved within a task, give that task to its `learn` to resume it.

    Raises:
        RunError: The file cannot be read, or does not contain a learner.
        ModelError: The model differs from the saved one.
        UsageError: An argument is invalid, or the method is unknown.

    Example:
        >>> import tempfile, torch, steppe
        >>> learner = steppe.Learner(torch.nn.Linear(8, 4), steppe.ER())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     learner.save(f"{directory}/learner")
        ...     learner = steppe.load(f"{directory}/learner", torch.nn.Linear(8, 4))
        >>> learner.num_tasks
        0
    """
    check_device(device)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    with torch.inference_mode(False):  # weights made in it could not be trained outside
        own = {
            "device": device,
            "input_transform": input_transform,
            "loss": loss,
            "metric": metric,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "keep_optimizer_state": keep_optimizer_state,
        }
        return _load(Path(path), model, threads, own)


def _load(path: Path, model: nn.Module, threads: int | None, own: Mapping[str, Any]) -> Learner:
    """Load a learner with those arguments of its own that a file does not hold."""
    device = own["device"]
    target = device if device is not None else next((p.device for p in model.parameters()), "cpu")
    state = read_state(path, "learner", target)
    undo: Callable[[], None] | None = None
    try:
        learner = Learner(
            model,
            _read_settings(state["settings"]),
            seed=state["seed"],
            padding=None if state.get("padding") is None else Padding(**state["padding"]),
            exclude=state["exclude"],
            head=state.get("head"),  # older files have none of these
            grow=state.get("grow", False),
            threads=state.get("threads") if threads is None else threads,
            **own,
        )
        undo = undoing(model)
        learner.load_state_dict(state)
    except Exception as error:
        if undo is not None:
            undo()
        if not isinstance(error, INVALID_STATE_ERRORS):
            raise
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise RunError(f"{path} does not contain a resumable learner: {reason}.") from error
    return learner


def _read_settings(saved: State) -> MethodConfig:
    for entry in METHODS.values():
        if entry.settings.__name__ == saved["kind"]:
            settings = entry.settings.from_mapping(saved["values"])
            assert isinstance(settings, MethodConfig)
            return settings
    raise UsageError(f"the learner was saved with the unknown method {saved['kind']}; register it first.")
