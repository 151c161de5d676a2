"""PyTorch Lightning: a callback that protects earlier tasks, one call of `Trainer.fit` per task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from steppe.custom_loop.batches import Forward
from steppe.custom_loop.gradient_memory import GradientProjectionMemory
from steppe.integrations.protection import protected, require_memory, share_between_processes
from steppe.integrations.requirements import require
from steppe.tensors.nest import Nest

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    require("steppe.integrations.lightning", "pytorch_lightning", "lightning")
    from pytorch_lightning import Callback, LightningModule, Trainer


class GradientMemoryCallback(Callback):
    """Keeps the steps of all optimizers outside a gradient memory, and updates the memory when `Trainer.fit` ends.

    Each call of `fit` is a task. A `fit` that fails or is interrupted leaves the memory as it was. The memory is part
    of Lightning's checkpoints, so that `fit(ckpt_path=...)` resumes within a task. Optimizers that the module wraps
    itself, in `configure_optimizers`, are left as they are.

    Args:
        memory: The memory, of the Lightning module or of a part of it that holds all parameters that are optimized.
        batches: The batches to update the memory with, or a function that returns them; by default those of the
            training data loader.
        forward: Runs the memory's model on a batch, as in `GradientProjectionMemory.update`.
        max_samples: How many samples to update the memory with; by default all.

    Attributes:
        memory: The memory.

    Raises:
        UsageError: An argument is invalid.

    Example:
        >>> import lightning, steppe, torch
        >>> class Classifier(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(8, 2)
        ...     def forward(self, x):
        ...         return self.layer(x)
        ...     def training_step(self, batch):
        ...         return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters())
        >>> model = Classifier()
        >>> callback = GradientMemoryCallback(steppe.GradientProjectionMemory(model), max_samples=300)
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
        self._task_is_open = False
        self._restored: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the optimizers."""
        if self._restored is not None:  # again, as the module has its number type and device only now
            self.memory.load_state_dict(self._restored)
            self._restored = None
        share_between_processes(self.memory)
        strategy = trainer.strategy
        strategy.optimizers = [protected(self.memory, optimizer) for optimizer in strategy.optimizers]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that a task has begun."""
        self._task_is_open = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the memory."""
        self._end_task(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the memory, if a checkpoint was resumed that was saved after a task's last step."""
        if self._task_is_open:
            pl_module.to(trainer.strategy.root_device)
            self._end_task(trainer)

    def _end_task(self, trainer: Trainer) -> None:
        precision = trainer.precision_plugin
        context: AbstractContextManager[Any] = nullcontext()
        if not hasattr(precision, "autocast_context_manager"):  # autocast would round what the layers see
            context = precision.forward_context()
        with context:
            self.memory.update(self._task_batches(trainer), self._forward, max_samples=self._max_samples)
        self._task_is_open = False

    def _task_batches(self, trainer: Trainer) -> Iterator[Nest]:
        source = trainer.train_dataloader if self._batches is None else self._batches
        for batch in source() if callable(source) else source:
            yield trainer.precision_plugin.convert_input(batch)

    def state_dict(self) -> dict[str, Any]:
        """The memory, for a checkpoint.

        Returns:
            The state.
        """
        return {"memory": self.memory.state_dict(), "task_is_open": self._task_is_open}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the memory from a checkpoint.

        Args:
            state_dict: A state from `state_dict`.
        """
        self._restored = state_dict["memory"]
        self.memory.load_state_dict(state_dict["memory"])
        self._task_is_open = bool(state_dict["task_is_open"])
