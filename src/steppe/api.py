"""The public names of steppe: everything that `import steppe` offers."""

from steppe.benchmarks import (
    PMNIST,
    CIFAR100Split,
    CIFAR100Superclass,
    ImageFolder,
    PMNIST60k,
    RotatedMNIST,
    SplitMNIST,
    TinyImageNet,
)
from steppe.benchmarks.base import Benchmark
from steppe.custom_loop.flat_sharpness import FlatSharpness
from steppe.custom_loop.gradient_memory import GradientProjectionMemory
from steppe.custom_loop.projected_optimizer import ProjectedOptimizer
from steppe.custom_loop.reservoir_buffer import ReservoirBuffer
from steppe.data.padding import Padding
from steppe.data.task import Task
from steppe.errors import DataError, DivergedError, ModelError, RunError, SteppeError, UsageError
from steppe.learning.accuracy_matrix import AccuracyMatrix
from steppe.learning.events import EpochEnded, MemoryUpdated, Progress
from steppe.learning.learner import Learner
from steppe.learning.load_learner import load
from steppe.learning.loop import TaskResult
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
from steppe.methods.base import Method, MethodConfig
from steppe.registry import register_benchmark, register_method
from steppe.settings import TrainingConfig, linear_range, log_range, one_of, setting
from steppe.tensors.batch import Batch
from steppe.tensors.ragged import Ragged
from steppe.tuning.learner_search import SearchResult, search
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
    "FlatSharpness",
    "GradientProjectionMemory",
    "ICaRL",
    "ImageFolder",
    "LaMAML",
    "Learner",
    "MemoryUpdated",
    "Method",
    "MethodConfig",
    "ModelError",
    "Multitask",
    "Oracle",
    "PMNIST60k",
    "Padding",
    "Progress",
    "ProjectedOptimizer",
    "Ragged",
    "ReservoirBuffer",
    "RotatedMNIST",
    "RunError",
    "SearchResult",
    "SplitMNIST",
    "SteppeError",
    "Task",
    "TaskResult",
    "TinyImageNet",
    "TrainingConfig",
    "UsageError",
    "__version__",
    "linear_range",
    "load",
    "log_range",
    "one_of",
    "register_benchmark",
    "register_method",
    "search",
    "setting",
]
