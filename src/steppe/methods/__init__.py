"""The methods, one file each; importing this package registers them by name."""

from steppe.methods.a_gem import AGEM
from steppe.methods.der import DERPlusPlus
from steppe.methods.er import ER
from steppe.methods.ewc import EWC
from steppe.methods.finetune import Finetune
from steppe.methods.fs_dgpm import FSDGPM
from steppe.methods.gem import GEM
from steppe.methods.gpm import GPM
from steppe.methods.icarl import ICaRL
from steppe.methods.la_maml import LaMAML
from steppe.methods.multitask import Multitask, Oracle
from steppe.methods.sam_er import SAMER
from steppe.methods.sgp import SGP

__all__ = [
    "AGEM",
    "ER",
    "EWC",
    "FSDGPM",
    "GEM",
    "GPM",
    "SAMER",
    "SGP",
    "DERPlusPlus",
    "Finetune",
    "ICaRL",
    "LaMAML",
    "Multitask",
    "Oracle",
]
