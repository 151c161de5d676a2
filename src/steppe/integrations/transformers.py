"""Hugging Face Transformers: a callback that protects earlier tasks, one call of `Trainer.train` per task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from steppe.checkpoint.io import read_state, write_state
from steppe.custom_loop.batches import Forward
from steppe.custom_loop.gradient_memory import GradientProjectionMemory
from steppe.errors import UsageError
from steppe.integrations.protection import protected, require_memory, share_between_processes
from steppe.integrations.requirements import require
from steppe.tensors.nest import Nest

require("steppe.integrations.transformers", "transformers", "transformers")
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402

MEMORY_FILE = "gradient_memory.safetensors"
_KIND = "gradient memory"


class GradientMemoryCallback(TrainerCallback):
    """Keeps the optimizer's steps outside a gradient memory, and updates the memory when `Trainer.train` ends.

    Each call of `train` is a task. Training that fails or is interrupted leaves the memory as it was. The memory is
    saved in each of the trainer's checkpoints, and loaded when one is resumed. An optimizer that was wrapped already
    (`Trainer(optimizers=(memory.wrap(...), None))`) is left as it is.

    Args:
        memory: The memory, of the trainer's model.
        batches: The batches to update the memory with, or a function that returns them; by default those of the
            training data loader.
        forward: Runs the model on a batch, as in `GradientProjectionMemory.update`.
        max_samples: How many samples to update the memory with; by default all.

    Attributes:
        memory: The memory.

    Raises:
        UsageError: An argument is invalid.
    """

    def __init__(
        self,
        memory: GradientProjectionMemory,
        *,
        batches: Iterable[Nest] | Callable[[], Iterable[Nest]] | None = None,
        forward: Forward | None = None,
        max_samples: int | None = None,
    ) -> None:
        self.memory = require_memory(memory)
        self._batches, self._forward, self._max_samples = batches, forward, max_samples
        self._was_loaded = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wrap the optimizer; when training is resumed, load the memory."""
        if state.global_step > 0 and not self._was_loaded:
            self._load_from_checkpoint(args, state.global_step)
        self._was_loaded = False
        share_between_processes(self.memory)
        prepared = kwargs["optimizer"]  # Accelerate's, around the trainer's
        wrapped = protected(self.memory, prepared.optimizer)
        if wrapped is not prepared.optimizer:  # prepare again: loss scaling is bound to the unwrapped optimizer's step
            prepared.__init__(wrapped, device_placement=False, scaler=prepared.scaler)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the memory in the checkpoint."""
        if args.should_save:
            self.save(_checkpoint(args, state.global_step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the memory."""
        source = kwargs["train_dataloader"] if self._batches is None else self._batches
        batches = source() if callable(source) else source
        self.memory.update(batches, self._forward, max_samples=self._max_samples)

    def save(self, directory: str | Path) -> None:
        """Save the memory in a directory, such as that of `Trainer.save_model`.

        Args:
            directory: The directory, which must exist.
        """
        write_state(Path(directory) / MEMORY_FILE, _KIND, self.memory.state_dict())

    def load(self, directory: str | Path) -> None:
        """Load the memory from a directory.

        Args:
            directory: The directory, of a checkpoint or one given to `save`.
        """
        self.memory.load_state_dict(read_state(Path(directory) / MEMORY_FILE, _KIND))
        self._was_loaded = True

    def _load_from_checkpoint(self, args: TrainingArguments, step: int) -> None:
        asked = getattr(args, "resume_from_checkpoint", None)
        places = [Path(asked)] if isinstance(asked, str) else []
        for directory in (*places, _checkpoint(args, step)):
            if (directory / MEMORY_FILE).exists():
                self.load(directory)
                return
        raise UsageError(
            f"training was resumed from a checkpoint, and {_checkpoint(args, step) / MEMORY_FILE} does not exist; call "
            "the callback's load(directory) with the checkpoint's directory before Trainer.train."
        )


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{step}"
