"""Heads: the columns of the logits that each task may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steppe.errors import UsageError, short_repr

_LARGEST_MASK = 100_000_000  # tasks times outputs


class Heads:
    """The head of each task so far, in the order of learning.

    Attributes:
        ranges: Each task's range of columns; None stands for all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.ranges: list[range | None] = []
        self._device = device
        self._allowed: Tensor | None = None  # (tasks, outputs): which outputs each task's loss may see

    def __len__(self) -> int:
        return len(self.ranges)

    def add(self, head: range | None, outputs: int) -> None:
        """Add the next task's head.

        Args:
            head: Its range of columns, or None for all of them.
            outputs: How many outputs the model has.
        """
        check_mask_size([*self.ranges, head], outputs)
        self.set_ranges([*self.ranges, head], outputs)

    def set_ranges(self, ranges: Sequence[range | None], outputs: int) -> None:
        """Replace all heads."""
        self.ranges = list(ranges)
        self._allowed = None
        if any(head is not None for head in ranges):
            whole = [range(outputs) if head is None else head for head in ranges]
            ends = torch.tensor([(head.start, head.stop) for head in whole], device="cpu")
            columns = torch.arange(outputs, device="cpu")
            self._allowed = ((columns >= ends[:, :1]) & (columns < ends[:, 1:])).to(self._device)

    @property
    def any_restricted(self) -> bool:
        """Whether some task uses only part of the columns."""
        return self._allowed is not None

    def mask(self, output: Tensor, task: Tensor) -> Tensor:
        """Return an output, (n, outputs), with −∞ outside the heads of the samples' tasks."""
        if self._allowed is None:
            return output
        return output.masked_fill(~self._allowed[task], -torch.inf)


def within_head(output: Tensor, target: Any, head: range | None) -> tuple[Tensor, Any]:
    """Return output and target as a loss or metric of one head sees them.

    Args:
        output: The model's output, (n, outputs) where there is a head.
        target: The target. Class numbers, (n,), count from the head's first column then; negative ones, which stand for
            ignored samples, stay. A target with a column per output is cut like the output; others stay as they are.
        head: The head's columns; None leaves both as they are.

    Returns:
        The output and the target.
    """
    if head is None:
        return output, target
    columns = output[:, head.start : head.stop]
    if not isinstance(target, Tensor):
        return columns, target
    if is_class_numbers(target):
        return columns, torch.where(target < 0, target, target - head.start)
    if target.ndim == 2 and target.shape[1] == output.shape[1]:
        return columns, target[:, head.start : head.stop]
    return columns, target


def is_class_numbers(target: object) -> bool:
    """Whether a target is one whole number per sample."""
    return (
        isinstance(target, Tensor)
        and target.ndim == 1
        and not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    )


def check_mask_size(ranges: Sequence[range | None], outputs: int) -> None:
    """Raise UsageError if the heads need too large a mask; a saved state with so many would be rejected too."""
    if not _fits(ranges, outputs):
        raise UsageError(
            f"{len(ranges)} tasks with heads among {outputs} outputs: tasks times outputs must be at most "
            f"{_LARGEST_MASK:,}. Give the model only as many outputs as its tasks need, or leave out the heads."
        )


def _fits(ranges: Sequence[range | None], outputs: int) -> bool:
    """Where every task uses all columns, there is no mask."""
    return all(head is None for head in ranges) or outputs * len(ranges) <= _LARGEST_MASK


def validate_heads(ranges: Any, outputs: Any) -> list[range | None]:
    """Return the heads in a saved state.

    Raises:
        ValueError: They are invalid.
    """
    if type(outputs) is not int or not 0 <= outputs <= _LARGEST_MASK or not _fits(ranges, outputs):
        raise ValueError(f"invalid number of outputs, {short_repr(outputs)}, for {len(ranges)} heads")
    for head in ranges:
        if head is not None and not (isinstance(head, range) and 0 <= head.start < head.stop <= outputs):
            raise ValueError(f"invalid head {short_repr(head)} for {outputs} outputs")
    return list(ranges)
