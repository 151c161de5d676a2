"""steppe: let a PyTorch network learn one task after another without forgetting the earlier ones."""

from steppe.benchmarks import PMNIST
from steppe.benchmarks.base import Benchmark
from steppe.errors import DataError, DivergedError, ModelError, RunError, SteppeError, UsageError
from steppe.learner import Learner, Learnt
from steppe.methods import (
    AGEM,
    ER,
    EWC,
    FSDGPM,
    GEM,
    GPM,
    SAMER,
    SGP,
    DERPlusPlus,
    Finetune,
    ICaRL,
    LaMAML,
    Multitask,
    Oracle,
)
from steppe.methods.base import Method, MethodSettings
from steppe.metrics import AccuracyMatrix
from steppe.protocol import Training
from steppe.registry import register_benchmark, register_method
from steppe.settings import setting
from steppe.task import Task
from steppe.types import Batch
from steppe.version import __version__

__all__ = [
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
    "DERPlusPlus",
    "DataError",
    "DivergedError",
    "Finetune",
    "ICaRL",
    "LaMAML",
    "Learner",
    "Learnt",
    "Method",
    "MethodSettings",
    "ModelError",
    "Multitask",
    "Oracle",
    "RunError",
    "SteppeError",
    "Task",
    "Training",
    "UsageError",
    "__version__",
    "register_benchmark",
    "register_method",
    "setting",
]
