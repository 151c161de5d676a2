"""A task: what is to be learnt next, and on which outputs of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from steppe.data.samples import Samples, as_samples
from steppe.errors import DataError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""Makes new variants of a batch of stored inputs, on their device, drawing from the generator alone, which is one of
the CPU wherever the inputs are."""


def check_head(head: range | None, outputs: int | None = None) -> None:
    """Refuse what is no range of output rows, or reaches beyond those there are."""
    if head is None:
        return
    if not isinstance(head, range):
        raise DataError(f"the head is {head!r}: give a range of output rows, such as range(10, 20).")
    if head.step != 1 or head.start < 0 or len(head) == 0:
        raise DataError(f"the head {head} is not a non-empty range of output rows with step 1.")
    if outputs is not None and head.stop > outputs:
        raise DataError(
            f"the head {head} reaches beyond the model's {outputs} outputs: "
            "enlarge the model's last layer or correct the head."
        )


class Task:
    """Labelled samples to learn from, samples to test on, and the head.

    `train`, `test` and `val` are pairs (inputs, labels) of tensors or arrays, `Dataset`s or `DataLoader`s. Labels
    are rows of the model's output. `head` is the range of rows that this task may use: None (single head) is all of
    them; with `head=range(10, 20)` loss and prediction look at rows 10 to 19 alone. `augment` varies each batch of
    training inputs, in the form they are stored in, every time it is seen; replay keeps the variants.
    """

    def __init__(
        self,
        train: object,
        test: object | None = None,
        *,
        val: object | None = None,
        head: range | None = None,
        augment: Augmentation | None = None,
        name: str = "task",
    ) -> None:
        self.name, self.head, self.augment = name, head, augment
        with self._name_errors():
            check_head(head)
        self.train = self._part("training", train)
        self.test = None if test is None else self._part("test", test)
        self.val = None if val is None else self._part("validation", val)

    def _part(self, part: str, source: object) -> Samples:
        with self.error_context(part):
            samples = as_samples(source)
            if len(samples) == 0:
                raise DataError("is empty: it holds no sample.")
        return samples

    @contextmanager
    def error_context(self, part: str) -> Iterator[None]:
        """Errors of the data inside name the task and the part."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self.name}: the {part} data {error}") from error

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Errors inside name the task."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self.name}: {error}") from error

    def check_head(self, outputs: int) -> None:
        """Refuse a head that a model with so many outputs does not have."""
        with self._name_errors():
            check_head(self.head, outputs)

    def check_labels(self, y: Tensor, outputs: int) -> None:
        """Refuse labels outside the task's head; the error is for `blamed` to complete."""
        rows = self.head if self.head is not None else range(outputs)
        if len(y) == 0:
            return
        low, high = int(y.min()), int(y.max())
        if low < rows.start or high >= rows.stop:
            remedy = (
                f"labels are rows of the model's output; if they count from 0 within the task, add {rows.start}."
                if self.head is not None and high - low < len(rows)
                else "enlarge the head or correct the labels."
            )
            raise DataError(
                f"has labels {low} to {high}, outside the head, rows {rows.start} to {rows.stop - 1}: {remedy}"
            )

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {len(self.train)} samples, head={self.head})"
