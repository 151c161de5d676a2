"""Benchmarks from one set of images, declared by a `TaskSpec` per task: its classes, its head, and its view of the
images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steppe.benchmarks.base import Benchmark
from steppe.data.images import ImageSet
from steppe.data.samples import TensorSamples
from steppe.data.task import Augmentation, Task
from steppe.errors import UsageError
from steppe.runtime.rng import Streams
from steppe.settings import setting

View = Callable[[Tensor], Tensor]
_MAX_CACHED_TEST_BYTES = 2**28  # for test images whose view is applied once and kept


@dataclass(frozen=True)
class TaskSpec:
    """Declares one task. Without a head, labels are those of the image set; with a head, the first of `classes` has the
    head's first output, and so on.
    """

    name: str
    classes: tuple[int, ...] | None = None
    """Classes of the set; None: all."""
    head: range | None = None
    view: View | None = None
    """Applied to each batch of images; None: no change."""
    outputs: range | None = None
    """The outputs of `classes`, if not those of the head."""


class ImageBenchmark(Benchmark):
    """A benchmark whose tasks are declared by specs over one set of images."""

    @abstractmethod
    def images(self) -> ImageSet:
        """The images."""

    @abstractmethod
    def task_specs(self, seed: int) -> Sequence[TaskSpec]:
        """The tasks in order."""

    def split(self, seed: int) -> Split:
        """How a task's images are split into training and validation; all are for training by default."""
        return use_all

    def augmentation(self) -> Augmentation | None:
        """Augmentation of training batches; none by default."""
        return None

    def num_test_samples(self) -> int | None:
        """Use only the first test images of each task, this many; None: all."""
        return None

    @property
    def shuffles_test_set(self) -> bool:
        """Whether to shuffle the test images, which are sorted by class: for networks that use batch statistics."""
        return False

    def stream(self, seed: int) -> Sequence[Task]:
        """The tasks, with samples drawn by the seed."""
        return self._tasks(seed, None)

    def validation_stream(self, seed: int) -> Sequence[Task]:
        """The tasks with training images that they do not use in place of the test images, at most as many of them.

        A task that uses all its images has those it holds out for validation there.

        Args:
            seed: The seed of the run.

        Returns:
            The tasks.

        Raises:
            UsageError: All images are for training.
        """
        return self._tasks(seed, torch.Generator().manual_seed(Streams(seed).derive_seed("validation images")))

    def _tasks(self, seed: int, draws: torch.Generator | None) -> Sequence[Task]:
        images, specs, split = self.images(), self.task_specs(seed), self.split(seed)
        return [self._task(images, spec, split, len(specs), draws) for spec in specs]

    def _task(self, images: ImageSet, spec: TaskSpec, split: Split, tasks: int, draws: torch.Generator | None) -> Task:
        """One task; with `draws`, unused training images drawn by it take the place of its test images."""
        x, y = _relabel(images.select("train", spec.classes), spec)
        train, val = split(y)
        test_x, test_y = _relabel(images.select("test", spec.classes), spec)
        count = self.num_test_samples() or len(test_y)
        if draws is not None:
            places = _unused(len(y), (train, val), draws)[:count]
            places = places if len(places) else val
            if len(places) == 0:
                raise UsageError(
                    f"{spec.name}: all training images are used, so there is none to validate on; use fewer "
                    "(benchmark.samples), or report on test data."
                )
            test_x, test_y = x[places], y[places]
        test_x, test_y = test_x[:count], test_y[:count]
        if self.shuffles_test_set:
            shuffled = _shuffle(len(test_y), 0)  # the same for every seed
            test_x, test_y = test_x[shuffled], test_y[shuffled]
        return Task(
            TensorSamples(x[train], y[train], spec.view),
            TensorSamples(test_x, test_y, spec.view, cache_view=tasks * test_x.nbytes <= _MAX_CACHED_TEST_BYTES),
            val=TensorSamples(x[val], y[val], spec.view) if len(val) else None,
            head=spec.head,
            augment=self.augmentation(),
            name=spec.name,
        )


def _unused(count: int, used: Sequence[Tensor], draws: torch.Generator) -> Tensor:
    """The indices below `count` that are not used, in random order."""
    free = torch.ones(count, dtype=torch.bool, device="cpu")
    for indices in used:
        free[indices] = False
    places = free.nonzero().flatten()
    return places[torch.randperm(len(places), generator=draws, device="cpu")]


def _relabel(pair: tuple[Tensor, Tensor], spec: TaskSpec) -> tuple[Tensor, Tensor]:
    """Map classes to outputs."""
    x, y = pair
    outputs = spec.head if spec.outputs is None else spec.outputs
    if outputs is None or spec.classes is None:
        return x, y
    rows = torch.zeros(max(spec.classes) + 1, dtype=torch.int64, device="cpu")
    rows[list(spec.classes)] = torch.tensor(outputs, device="cpu")
    return x, rows[y]


Split = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps a task's labels to the indices of its training and of its validation images."""


def use_all(y: Tensor) -> tuple[Tensor, Tensor]:
    """All samples for training, none for validation."""
    return torch.arange(len(y), device="cpu"), torch.arange(0, device="cpu")


def random_subset(count: int, seed: int, *, held_out: float = 0.0) -> Split:
    """Use `count` random samples of each task, different ones for each.

    Args:
        count: The number of samples.
        seed: Decides which samples are drawn.
        held_out: The fraction of them held out for validation.

    Returns:
        The split. It draws new samples each time it is called.
    """
    choices = torch.Generator().manual_seed(seed)

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        picked = torch.randperm(len(y), generator=choices, device="cpu")[:count]
        valid = round(held_out * len(picked))
        return picked[valid:], picked[:valid]

    return split


def holdout(count: int, seed: int) -> Split:
    """Hold out `count` samples for validation, regardless of class: the first ones after a shuffle with NumPy's legacy
    generator, as in the released code.

    Args:
        count: The number of samples.
        seed: The seed of the shuffle.

    Returns:
        The split.
    """

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        shuffled = _shuffle(len(y), seed)
        return shuffled[count:], shuffled[:count]

    return split


def holdout_per_class(count: int, seed: int) -> Split:
    """Hold out `count` samples of each class for validation."""

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        parts = [(y == label).nonzero().flatten() for label in torch.unique(y)]
        parts = [part[_shuffle(len(part), seed)] for part in parts]
        return torch.cat([part[count:] for part in parts]), torch.cat([part[:count] for part in parts])

    return split


def _shuffle(count: int, seed: int) -> Tensor:
    places = np.arange(count)
    # The legacy generator takes 32-bit words.
    np.random.RandomState(seed if seed < 2**32 else [seed % 2**32, seed >> 32]).shuffle(places)
    return torch.from_numpy(places)


SCENARIOS = ("task", "domain", "class")


def scenario_setting() -> Any:
    """The setting that decides what a sample is predicted among."""
    return setting(
        "task",
        "what a sample is predicted among: the classes of its task, which is known (task: a head per task), the places "
        "of the classes within a task, which all tasks share (domain), or all classes seen so far (class)",
        choices=SCENARIOS,
    )


def scenario_remarks(scenario: str) -> list[str]:
    """The remark on results of another scenario than task-incremental learning."""
    meaning = {
        "domain": "domain-incremental: all tasks share the same outputs.",
        "class": "class-incremental: each sample is predicted among all classes seen so far.",
    }
    return [meaning[scenario]] if scenario in meaning else []


def split_classes(
    order: Sequence[int], tasks: int, each: int, names: Sequence[str] = (), *, scenario: str = "task"
) -> list[TaskSpec]:
    """Split classes into tasks.

    Args:
        order: The classes in order.
        tasks: The number of tasks.
        each: Classes per task.
        names: The names of the classes, used to name the tasks; by default, tasks are named by class numbers.
        scenario: "task": each task has its own head. "domain": the first class of every task is output 0, and so on.
            "class": each class has its own output, and there are no heads.

    Returns:
        One spec per task.

    Example:
        >>> [spec.name for spec in split_classes(range(10), 2, 2)]
        ['classes 0, 1', 'classes 2, 3']
    """
    specs = []
    for number in range(tasks):
        rows = range(each * number, each * (number + 1))
        classes = tuple(order[rows.start : rows.stop])
        if names:
            name = ", ".join(names[label] for label in classes)
        elif len(classes) > 2 and classes == tuple(range(classes[0], classes[-1] + 1)):
            name = f"classes {classes[0]} to {classes[-1]}"
        else:
            name = f"classes {', '.join(map(str, classes))}"
        outputs = range(each) if scenario == "domain" else rows
        specs.append(TaskSpec(name, classes, outputs if scenario == "task" else None, outputs=outputs))
    return specs
