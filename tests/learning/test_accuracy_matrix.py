"""ACC, BWT, forgetting, learning accuracy and forward transfer against explicit loops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import measures

from steppe.errors import DataError
from steppe.learning.accuracy_matrix import AccuracyMatrix

triangles = st.integers(1, 6).flatmap(
    lambda size: st.tuples(*(st.lists(st.floats(0, 100), min_size=k, max_size=k) for k in range(1, size + 1)))
)


@given(triangles)
def test_measures_equal_their_loops(rows: tuple[list[float], ...]) -> None:
    matrix = AccuracyMatrix(rows)
    for name, value in measures(list(rows)).items():
        assert getattr(matrix, name) == pytest.approx(value, abs=1e-9)
    assert len(matrix) == len(rows)


def test_measures_by_hand() -> None:
    """Averages are over T − 1 tasks, not T; forgetting is measured from the best accuracy, here not the first."""
    matrix = AccuracyMatrix([[80], [90, 70], [60, 76, 50]])
    assert matrix.acc == pytest.approx(62)
    assert matrix.bwt == pytest.approx(((60 - 80) + (76 - 70)) / 2)
    assert matrix.forgetting == pytest.approx(((90 - 60) + (70 - 76)) / 2)
    assert matrix.learning_acc == pytest.approx((80 + 70 + 50) / 3)
    assert matrix.square() == [[80, None, None], [90, 70, None], [60, 76, 50]]


def test_one_task_has_no_forgetting() -> None:
    matrix = AccuracyMatrix([[42.0]])
    assert (matrix.acc, matrix.learning_acc, matrix.bwt, matrix.forgetting) == (42.0, 42.0, 0.0, 0.0)


def test_jointly_learned_tasks_leave_unmeasured_entries_none() -> None:
    matrix = AccuracyMatrix([[50]])
    matrix.append([60, 70, 80], num_tasks=2)
    assert matrix.acc == pytest.approx(70)
    assert (matrix.bwt, matrix.forgetting, matrix.learning_acc) == (None, None, None)
    assert matrix.square() == [[50, None, None], [None, None, None], [60, 70, 80]]


@pytest.mark.parametrize("row", [[], [1.0], [1.0, 2.0, 3.0]])
def test_rows_of_the_wrong_length_are_rejected(row: list[float]) -> None:
    with pytest.raises(DataError, match=f"row 2 .*{len(row)} entries"):
        AccuracyMatrix([[1.0], row])


@pytest.mark.parametrize(("row", "learnt"), [([1.0, 2.0], 2), ([1.0, 2.0, "x"], 2), ([1.0], 0)])
def test_rejected_row_does_not_change_the_matrix(row: list[float], learnt: int) -> None:
    matrix = AccuracyMatrix([[50]])
    with pytest.raises((DataError, ValueError)):
        matrix.append(row, num_tasks=learnt)
    assert matrix.rows == [[50]]
    matrix.append([60, 70, 80], num_tasks=2)
    assert matrix.rows == [[50], None, [60, 70, 80]]


def test_forward_transfer_by_hand() -> None:
    """Accuracy on task 2 before it is learned, minus that of the untrained network, and likewise task 3; the first task
    does not count."""
    matrix = AccuracyMatrix([[80], [90, 70], [60, 76, 50]])
    assert matrix.forward_transfer is None
    matrix.untrained, matrix.ahead = [99, 10, 12], [25, 11]
    assert matrix.forward_transfer == pytest.approx(((25 - 10) + (11 - 12)) / 2)
    matrix.ahead = [25]
    assert matrix.forward_transfer is None


def test_one_task_has_no_forward_transfer() -> None:
    matrix = AccuracyMatrix([[42.0]])
    matrix.untrained = [10.0]
    assert matrix.forward_transfer == 0
