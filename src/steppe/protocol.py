"""The training protocol: how long and in what portions a task is learnt."""

from __future__ import annotations

from dataclasses import dataclass

from steppe.settings import Settings, setting


@dataclass(frozen=True)
class Training(Settings):
    """Epochs, batches, validation; a benchmark carries the paper's values."""

    epochs: int = setting(1, "passes over a task's samples", at_least=1)
    batch_size: int = setting(10, "samples of the current task in a batch", at_least=1)
    glances: int = setting(1, "updates made on each batch", at_least=1)
    patience: int = setting(
        0,
        "epochs without a better validation loss before the step sizes are cut; the best weights are kept in the end; "
        "0: no validation",
        at_least=0,
    )
    lr_divisor: float = setting(2.0, "by what a cut divides the step sizes, with `patience`", above=1)
    lr_min: float = setting(1e-5, "a cut to a step size below this ends the task, with `patience`", at_least=0)
    freeze_norms: bool = setting(False, "learn scale and shift of normalisation layers in the first task only")
    freeze_statistics: bool = setting(
        False, "from the second task on, normalise by the first task's running statistics, in training too"
    )
    precision: str = setting(
        "float32",
        "in what the network multiplies in training; weights, momentum, bases, validation and tests are float32",
        choices=("float32", "bfloat16"),
    )
