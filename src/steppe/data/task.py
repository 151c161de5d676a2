"""A task: data to learn next, and which of the model's outputs it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from steppe.data.samples import as_samples
from steppe.data.samples_base import Samples
from steppe.errors import DataError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""Returns a random variant of a batch of stored inputs, on their device; draws only from the generator, a CPU one."""


def check_head(head: range | None, outputs: int | None = None) -> None:
    """Check that a head is a valid range of outputs; None is valid.

    Args:
        head: The head.
        outputs: The model's number of outputs, if known.

    Raises:
        DataError: It is not.
    """
    if head is None:
        return
    if not isinstance(head, range):
        raise DataError(f"invalid head {head!r}; expected a range of outputs, such as range(10, 20).")
    if head.step != 1 or head.start < 0 or len(head) == 0:
        raise DataError(f"invalid head {head}; expected a non-empty range of outputs with step 1.")
    if outputs is not None and head.stop > outputs:
        raise DataError(
            f"the head {head} exceeds the model's {outputs} outputs; "
            "enlarge the model's last layer or correct the head."
        )


class Task:
    """Training and test data of one task, and the outputs that it uses.

    Data are pairs (inputs, labels) of tensors or arrays, `Dataset`s, `IterableDataset`s or `DataLoader`s. Inputs are a
    tensor, passed as `model(x)`; a dictionary of tensors (any mapping, such as a tokenizer's output), passed as
    `model(**x)`; or a tuple of them, passed as `model(*x)`. Each tensor has the samples along its first dimension.
    Datasets may also yield dictionaries that hold the label under "labels" or "label". A list is a list of samples;
    sequences of different lengths need `padding` in the learner. Labels are indices of the model's outputs, or what
    the learner's `loss` takes.

    Args:
        train: Training data.
        test: Test data, for `evaluate`.
        val: Validation data, for learning rate decay and early stopping.
        head: The outputs that the task uses: with `range(10, 20)`, loss and prediction see logits 10 to 19 only. None
            (single head) is all of them.
        augment: Returns a random variant of each training batch, in stored form; replay keeps the variants.
        name: Names the task in errors, events and tables.

    Raises:
        DataError: The data or the head is invalid.

    Example:
        >>> x, y = torch.randn(8, 4), torch.tensor([0, 1] * 4)
        >>> Task((x, y), head=range(2), name="even and odd")
        Task('even and odd', 8 samples, head=range(0, 2))
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
            if samples.count == 0:
                raise DataError("is empty.")
        return samples

    @contextmanager
    def error_context(self, part: str) -> Iterator[None]:
        """Prefix a DataError inside with the task and the part of its data ("training", "test" or "validation")."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self.name}: the {part} data {error}") from error

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Prefix a DataError inside with the task."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self.name}: {error}") from error

    def check_head(self, outputs: int) -> None:
        """DataError if a model with this number of outputs does not have the head."""
        with self._name_errors():
            check_head(self.head, outputs)

    def check_labels(self, y: Any, outputs: int) -> None:
        """DataError, to be prefixed by `error_context`, if labels are not class numbers within the task's head."""
        rows = self.head if self.head is not None else range(outputs)
        if not isinstance(y, Tensor) or y.ndim != 1:
            raise DataError(f"has labels of shape {tuple(y.shape)}; expected one class number per input.")
        if y.dtype != torch.int64:  # what integers were converted to
            raise DataError(f"has labels of type {y.dtype}; expected integer class numbers.")
        if len(y) == 0:
            return
        low, high = int(y.min()), int(y.max())
        if low < rows.start or high >= rows.stop:
            remedy = (
                f"labels index the model's outputs; if yours start at 0 within the task, add {rows.start}."
                if self.head is not None and high - low < len(rows)
                else "enlarge the head or correct the labels."
            )
            raise DataError(
                f"has labels {low} to {high}, outside the head, outputs {rows.start} to {rows.stop - 1}; {remedy}"
            )

    def __repr__(self) -> str:
        size = "a stream" if self.train.count is None else f"{self.train.count} samples"
        return f"Task({self.name!r}, {size}, head={self.head})"
