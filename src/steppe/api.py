"""What `import steppe` offers, by name."""

from steppe.benchmarks import (
    PMNIST,
    CIFAR100Split,
    CIFAR100Superclass,
    Folder,
    LongPMNIST,
    RotatedMNIST,
    SplitMNIST,
    TinyImageNet,
)
from steppe.benchmarks.base import Benchmark
from steppe.errors import DataError, DivergedError, ModelError, RunError, SteppeError, UsageError
from steppe.events import EpochEnded, Progress
from steppe.learner import Learner
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
from steppe.saved_learner import load
from steppe.settings import setting
from steppe.task import Task
from steppe.training import Learnt
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
    "CIFAR100Split",
    "CIFAR100Superclass",
    "DERPlusPlus",
    "DataError",
    "DivergedError",
    "EpochEnded",
    "Finetune",
    "Folder",
    "ICaRL",
    "LaMAML",
    "Learner",
    "Learnt",
    "LongPMNIST",
    "Method",
    "MethodSettings",
    "ModelError",
    "Multitask",
    "Oracle",
    "Progress",
    "RotatedMNIST",
    "RunError",
    "SplitMNIST",
    "SteppeError",
    "Task",
    "TinyImageNet",
    "Training",
    "UsageError",
    "__version__",
    "load",
    "register_benchmark",
    "register_method",
    "setting",
]
