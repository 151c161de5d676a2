"""The methods, one file each; importing this package makes them known by name."""

from steppe.methods.er import ER
from steppe.methods.finetune import Finetune
from steppe.methods.fs_dgpm import FSDGPM
from steppe.methods.multitask import Multitask, Oracle

__all__ = ["ER", "FSDGPM", "Finetune", "Multitask", "Oracle"]
