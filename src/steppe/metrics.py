"""ACC, BWT and their kin from the accuracy matrix R, R[i][j] = test accuracy on task j after task i (percent)."""

from __future__ import annotations

from collections.abc import Sequence

from steppe.errors import DataError


class AccuracyMatrix:
    """The lower triangle of R, grown by a row after each task."""

    def __init__(self, rows: Sequence[Sequence[float]] = ()) -> None:
        self.rows: list[list[float]] = []
        for row in rows:
            self.append(row)

    def append(self, row: Sequence[float]) -> None:
        """The accuracies on every task seen so far, after one more task."""
        if len(row) != len(self.rows) + 1:
            raise DataError(f"row {len(self.rows) + 1} of the accuracy matrix has {len(row)} entries.")
        self.rows.append([float(value) for value in row])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def acc(self) -> float:
        """Mean accuracy over all tasks after the last."""
        return _mean(self.rows[-1])

    @property
    def bwt(self) -> float:
        """Backward transfer: mean of R[T][j] − R[j][j] over the T − 1 earlier tasks; 0 for one task."""
        last = self.rows[-1]
        return _mean([last[j] - self.rows[j][j] for j in range(len(last) - 1)])

    @property
    def learning_acc(self) -> float:
        """Mean accuracy on each task just after it was learnt."""
        return _mean([row[-1] for row in self.rows])

    @property
    def forgetting(self) -> float:
        """Mean fall from each earlier task's best accuracy, over the T − 1 earlier tasks; 0 for one task."""
        last = self.rows[-1]
        best = [max(row[j] for row in self.rows[j:-1]) for j in range(len(last) - 1)]
        return _mean([top - now for top, now in zip(best, last[:-1], strict=True)])

    def square(self) -> list[list[float | None]]:
        """R as a square with None above the diagonal."""
        return [[*row, *[None] * (len(self.rows) - len(row))] for row in self.rows]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
