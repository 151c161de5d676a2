"""ACC, BWT and other measures from the accuracy matrix R, R[i][j] = test accuracy on task j after task i (percent).

The same measures hold for any metric, such as a learner's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from steppe.errors import DataError


class AccuracyMatrix:
    """The lower triangle of R, with a row appended after each task.

    Tasks learned together skip rows: `append(row, num_tasks=3)` stands for three tasks, of which only the row after the
    last exists. Measures that need the others are None.

    Args:
        rows: Rows to begin with.
        higher_is_better: False for errors and losses: then forgetting is the rise from the lowest value, and a negative
            BWT is good.

    Attributes:
        rows: The rows so far; None for those that were skipped.
        untrained: The untrained network's accuracy on every task; fill it in for forward transfer.
        ahead: The accuracy on each task but the first just before it is learned; likewise.

    Example:
        >>> matrix = AccuracyMatrix([[90.0], [80.0, 95.0]])
        >>> matrix.acc, matrix.bwt
        (87.5, -10.0)
    """

    def __init__(self, rows: Sequence[Sequence[float]] = (), *, higher_is_better: bool = True) -> None:
        self._higher_is_better = higher_is_better
        self.rows: list[list[float] | None] = []
        self.untrained: list[float] = []
        self.ahead: list[float] = []
        for row in rows:
            self.append(row)

    def append(self, row: Sequence[float], num_tasks: int = 1) -> None:
        """Append a row.

        Args:
            row: The accuracy on every task so far.
            num_tasks: How many tasks were learned since the last row.

        Raises:
            DataError: The row has another length than there are tasks.
        """
        if num_tasks < 1:
            raise DataError(f"num_tasks = {num_tasks} must be at least 1.")
        place = len(self.rows) + num_tasks
        if len(row) != place:
            raise DataError(
                f"row {place} of the accuracy matrix has {len(row)} entries; "
                f"it needs one for each of the {place} tasks."
            )
        values = [float(value) for value in row]  # before anything is appended: it may fail
        self.rows += [*[None] * (num_tasks - 1), values]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last(self) -> list[float]:
        """The accuracies after the last task."""
        if not self.rows or self.rows[-1] is None:
            raise DataError("the accuracy matrix is empty; append a row first.")
        return self.rows[-1]

    @property
    def acc(self) -> float:
        """Mean accuracy over all tasks after the last."""
        return _mean(self.last)

    @property
    def bwt(self) -> float | None:
        """Backward transfer: mean of `R[T][j] − R[j][j]` over the T − 1 earlier tasks; 0 for one task."""
        rows = self._complete()
        return None if rows is None else _mean([now - row[-1] for now, row in zip(self.last, rows[:-1], strict=False)])

    @property
    def learning_acc(self) -> float | None:
        """Mean accuracy on each task just after it was learned."""
        rows = self._complete()
        return None if rows is None else _mean([row[-1] for row in rows])

    @property
    def forgetting(self) -> float | None:
        """Mean fall from each earlier task's best accuracy, over the T − 1 earlier tasks; 0 for one task.

        Where lower is better it is the mean rise from the lowest value.
        """
        rows = self._complete()
        if rows is None:
            return None
        sign = 1 if self._higher_is_better else -1
        best = [max(sign * row[j] for row in rows[j:-1]) for j in range(len(rows) - 1)]
        return _mean([top - sign * now for top, now in zip(best, self.last[:-1], strict=True)])

    @property
    def forward_transfer(self) -> float | None:
        """Mean of `R[j−1][j]`, less the untrained network's accuracy on task j, over the T − 1 later tasks; 0 for one
        task, None where it was not measured.
        """
        if len(self.untrained) != len(self.rows) or len(self.ahead) != len(self.rows) - 1:
            return None
        return _mean([before - chance for before, chance in zip(self.ahead, self.untrained[1:], strict=True)])

    def square(self) -> list[list[float | None]]:
        """Return R as a square, with None above the diagonal and in skipped rows."""
        size = len(self.rows)
        return [[None] * size if row is None else [*row, *[None] * (size - len(row))] for row in self.rows]

    def _complete(self) -> list[list[float]] | None:
        rows = [row for row in self.rows if row is not None]
        return rows if len(rows) == len(self.rows) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
