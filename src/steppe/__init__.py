"""steppe: let a PyTorch network learn one task after another without forgetting the earlier ones.

What it offers lies in `steppe.api`, which is imported when one of its names is first asked for: the command line should
not have to wait for torch to say what it can do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steppe.api import *  # noqa: F403

__all__ = [  # noqa: F405 - the same as in steppe.api
    "AGEM",
    "ER",
    "EWC",
    "FSDGPM",
    "GEM",
    "GPM",
    "PMNIST",
    "SAMER",
    "SGP",
    "AccuracyMatrix",
    "Batch",
    "Benchmark",
    "CIFAR100Split",
    "CIFAR100Superclass",
    "DERPlusPlus",
    "DataError",
    "DivergedError",
    "EpochEnded",
    "Finetune",
    "ICaRL",
    "ImageFolder",
    "LaMAML",
    "Learner",
    "Method",
    "MethodConfig",
    "ModelError",
    "Multitask",
    "Oracle",
    "PMNIST60k",
    "Progress",
    "RotatedMNIST",
    "RunError",
    "SplitMNIST",
    "SteppeError",
    "Task",
    "TaskResult",
    "TinyImageNet",
    "TrainingConfig",
    "UsageError",
    "__version__",
    "load",
    "register_benchmark",
    "register_method",
    "setting",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'steppe' has no attribute {name!r}")
    return getattr(importlib.import_module("steppe.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
