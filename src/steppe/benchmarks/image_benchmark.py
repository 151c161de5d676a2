"""Tasks from a set of images, declared as data: which classes, seen how, on which outputs, how many held out.

A benchmark of this form says what its images are and gives one `TaskSpec` per task; everything else follows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from steppe.benchmarks.base import Benchmark
from steppe.data.images import ImageSet
from steppe.data.samples import TensorSamples
from steppe.data.task import Augmentation, Task

View = Callable[[Tensor], Tensor]
_MAX_CACHED_TEST_BYTES = 2**28  # bytes of test images that are viewed once and kept, rather than at every test


@dataclass(frozen=True)
class TaskSpec:
    """One task. Its labels are the set's own in a single head; with a head they are its rows, in the order of
    `classes`.
    """

    name: str
    classes: tuple[int, ...] | None = None
    """Which classes of the set; None: all of them."""
    head: range | None = None
    view: View | None = None
    """What the task sees of a batch of images; None: the images themselves."""


class ImageBenchmark(Benchmark):
    """A benchmark whose tasks are declared by plans over one set of images."""

    @abstractmethod
    def images(self) -> ImageSet:
        """The images."""

    @abstractmethod
    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """The tasks in order."""

    def split(self, seed: int) -> Split:
        """Which of a task's images it learns from, and which it validates on; all and none by default."""
        return use_all

    def augmentation(self) -> Augmentation | None:
        """How batches vary in training."""
        return None

    def num_test_samples(self) -> int | None:
        """How many test images each task has, if not all."""
        return None

    @property
    def shuffles_test_set(self) -> bool:
        """Whether test images come in mixed order, rather than class by class: for networks whose answers depend on
        what else is in a batch.
        """
        return False

    def stream(self, seed: int) -> Sequence[Task]:
        """The tasks, with the seed's samples."""
        images, plans, split = self.images(), self.task_specs(seed), self.split(seed)
        return [self._task(images, plan, split, len(plans)) for plan in plans]

    def _task(self, images: ImageSet, plan: TaskSpec, split: Split, tasks: int) -> Task:
        x, y = _relabel(images.select("train", plan.classes), plan)
        train, valid = split(y)
        test_x, test_y = (
            part[: self.num_test_samples()] for part in _relabel(images.select("test", plan.classes), plan)
        )
        if self.shuffles_test_set:
            mixed = _shuffle(len(test_y), 0)  # the same for every seed
            test_x, test_y = test_x[mixed], test_y[mixed]
        return Task(
            TensorSamples(x[train], y[train], plan.view),
            TensorSamples(test_x, test_y, plan.view, cache_view=tasks * test_x.nbytes <= _MAX_CACHED_TEST_BYTES),
            val=TensorSamples(x[valid], y[valid], plan.view) if len(valid) else None,
            head=plan.head,
            augment=self.augmentation(),
            name=plan.name,
        )


def _relabel(pair: tuple[Tensor, Tensor], plan: TaskSpec) -> tuple[Tensor, Tensor]:
    """Labels as rows of the task's head."""
    x, y = pair
    if plan.head is None or plan.classes is None:
        return x, y
    rows = torch.zeros(max(plan.classes) + 1, dtype=torch.int64, device="cpu")
    rows[list(plan.classes)] = torch.tensor(plan.head, device="cpu")
    return x, rows[y]


Split = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From a task's labels the places of its training and of its validation images."""


def use_all(y: Tensor) -> tuple[Tensor, Tensor]:
    """Train on all, validate on none."""
    return torch.arange(len(y), device="cpu"), torch.arange(0, device="cpu")


def random_subset(count: int, seed: int, *, held_out: float = 0.0) -> Split:
    """Train on `count` samples picked by the seed, anew for each task; a share of them validates."""
    choices = torch.Generator().manual_seed(seed)

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        picked = torch.randperm(len(y), generator=choices, device="cpu")[:count]
        valid = round(held_out * len(picked))
        return picked[valid:], picked[:valid]

    return split


def holdout(count: int, seed: int) -> Split:
    """Validate on `count` samples whatever their class, the first of a shuffle by NumPy's legacy generator, which is
    what the released code draws them by.
    """

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        shuffled = _shuffle(len(y), seed)
        return shuffled[count:], shuffled[:count]

    return split


def holdout_per_class(count: int, seed: int) -> Split:
    """Validate on `count` samples of every class."""

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        parts = [(y == label).nonzero().flatten() for label in torch.unique(y)]
        parts = [part[_shuffle(len(part), seed)] for part in parts]
        return torch.cat([part[count:] for part in parts]), torch.cat([part[:count] for part in parts])

    return split


def _shuffle(count: int, seed: int) -> Tensor:
    places = np.arange(count)
    # The legacy generator takes 32 bits; a longer seed is given in two words.
    np.random.RandomState(seed if seed < 2**32 else [seed % 2**32, seed >> 32]).shuffle(places)
    return torch.from_numpy(places)


def split_classes(order: Sequence[int], tasks: int, each: int, names: Sequence[str] = ()) -> list[TaskSpec]:
    """Tasks of `each` classes, taken in the order given, every task with output rows of its own; called by the
    classes' names, where these are given, or by their numbers.
    """
    plans = []
    for number in range(tasks):
        rows = range(each * number, each * (number + 1))
        classes = tuple(order[rows.start : rows.stop])
        if names:
            called = ", ".join(names[label] for label in classes)
        elif len(classes) > 2 and classes == tuple(range(classes[0], classes[-1] + 1)):
            called = f"classes {classes[0]} to {classes[-1]}"
        else:
            called = f"classes {', '.join(map(str, classes))}"
        plans.append(TaskSpec(called, classes, rows))
    return plans
