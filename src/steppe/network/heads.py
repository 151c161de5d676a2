"""Heads: the rows of the output that each task may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steppe.errors import UsageError, short_repr

_MOST_ROOM = 100_000_000  # heads times outputs that room is made for


class Heads:
    """The heads of the tasks met so far, in order of learning; None stands for all rows."""

    def __init__(self, device: torch.device) -> None:
        self.rows: list[range | None] = []
        self._device = device
        self._allowed: Tensor | None = None  # (tasks, outputs): which outputs each task's loss may see

    def add(self, head: range | None, outputs: int) -> None:
        """Make room for the next task."""
        check_room([*self.rows, head], outputs)
        self.set_rows([*self.rows, head], outputs)

    def set_rows(self, rows: Sequence[range | None], outputs: int) -> None:
        """These heads instead of those that were."""
        self.rows = list(rows)
        self._allowed = None
        if any(head is not None for head in rows):
            whole = [range(outputs) if head is None else head for head in rows]
            ends = torch.tensor([(head.start, head.stop) for head in whole], device="cpu")
            columns = torch.arange(outputs, device="cpu")
            self._allowed = ((columns >= ends[:, :1]) & (columns < ends[:, 1:])).to(self._device)

    def mask(self, output: Tensor, task: Tensor) -> Tensor:
        """An output, (n, outputs), with everything outside the heads of the samples' tasks shut off."""
        if self._allowed is None:
            return output
        return output.masked_fill(~self._allowed[task], -torch.inf)


def check_room(rows: Sequence[range | None], outputs: int) -> None:
    """Refuse more heads than room is made for; a saved state with so many would be refused as well."""
    if not _have_room(rows, outputs):
        raise UsageError(
            f"{len(rows)} tasks, of which some have heads among {outputs} outputs: tasks times outputs may be "
            f"{_MOST_ROOM:,} at most. Give the model no more outputs than its tasks need, or the tasks no heads."
        )


def _have_room(rows: Sequence[range | None], outputs: int) -> bool:
    """Where every task uses all rows, nothing has to be kept for each."""
    return all(head is None for head in rows) or outputs * len(rows) <= _MOST_ROOM


def validate_heads(rows: Any, outputs: Any) -> list[range | None]:
    """Heads as a saved state tells them; what cannot be is refused by ValueError."""
    if type(outputs) is not int or not 0 <= outputs <= _MOST_ROOM or not _have_room(rows, outputs):
        raise ValueError(f"{len(rows)} heads of {short_repr(outputs)} outputs cannot be")
    for head in rows:
        if head is not None and not (isinstance(head, range) and 0 <= head.start < head.stop <= outputs):
            raise ValueError(f"a head of {short_repr(head)} among {outputs} outputs cannot be")
    return list(rows)
