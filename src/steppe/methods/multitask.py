"""Multitask and Oracle: upper bounds that see several tasks at once.

Multitask learns all tasks of the benchmark together. Oracle learns all tasks so far from scratch at each new task. Both
take plain SGD steps on the cross-entropy of each sample on its own head.
"""

from __future__ import annotations

from dataclasses import dataclass

from steppe.methods.finetune import PRESETS, Finetune
from steppe.registry import register_method


@dataclass(frozen=True)
class Multitask(Finetune):
    """Settings of Multitask."""

    schedule = "joint"


@dataclass(frozen=True)
class Oracle(Finetune):
    """Settings of Oracle."""

    schedule = "retrain"


_TRAINING = {"pmnist": {"epochs": 5, "updates_per_batch": 1}}
register_method(
    "multitask",
    Multitask,
    "All tasks at once; an upper bound, not continual learning.",
    presets=PRESETS,
    training=_TRAINING,
)
register_method(
    "oracle",
    Oracle,
    "All tasks so far, from scratch at each new task; an upper bound.",
    presets=PRESETS,
    training=_TRAINING,
)
