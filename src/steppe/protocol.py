"""The training protocol: how long and in what portions a task is learnt."""

from __future__ import annotations

from dataclasses import dataclass

from steppe.settings import Settings, setting


@dataclass(frozen=True)
class Training(Settings):
    """Epochs, batches and glances; a benchmark carries the paper's values."""

    epochs: int = setting(1, "passes over a task's samples", at_least=1)
    batch_size: int = setting(10, "samples of the current task in a batch", at_least=1)
    glances: int = setting(1, "updates made on each batch", at_least=1)
