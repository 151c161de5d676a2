"""Accuracy and flatness: the rank correlation against explicit formulas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made_result, write_landscape, write_run

from steppe.errors import RunError
from steppe.landscape.files import read_landscape
from steppe.landscape.rank_correlation import compare_runs, rank_correlations, without_reference_methods


def rows_of(values: list[tuple[float, float]]) -> list[dict[str, object]]:
    return [
        {"method": f"m{number}", "seed": 0, "acc": acc, "bwt": 1.0, "sharpness_at_the_end": sharpness}
        for number, (acc, sharpness) in enumerate(values)
    ]


@given(st.lists(st.integers(0, 50), min_size=3, max_size=8, unique=True), st.randoms())
def test_rank_correlation_equals_the_formula_without_ties(accs: list[int], chance: object) -> None:
    """1 − 6 Σ d² / (n (n² − 1)) if there are no ties; only the ranks count."""
    sharpness = list(accs)
    chance.shuffle(sharpness)  # type: ignore[attr-defined]
    (found,) = rank_correlations(rows_of([(acc, 1.5**s) for acc, s in zip(accs, sharpness, strict=True)]))
    squares = sum(
        (sorted(accs).index(a) - sorted(sharpness).index(s)) ** 2 for a, s in zip(accs, sharpness, strict=True)
    )
    count = len(accs)
    assert found["measure"] == "sharpness_at_the_end"
    assert found["rank_correlation_with_acc"] == pytest.approx(1 - 6 * squares / (count * (count**2 - 1)))


@given(st.permutations(range(5)))
def test_p_value_is_the_share_of_permutations(order: list[int]) -> None:
    def distance(permuted: Sequence[int]) -> int:
        return sum((place - value) ** 2 for place, value in enumerate(permuted))

    middle = 20  # of all orders: no correlation
    going_as_far = [
        abs(distance(other) - middle) >= abs(distance(order) - middle) for other in itertools.permutations(range(5))
    ]
    rows: list[dict[str, object]] = [
        {"method": f"m{place}", "acc": place, "bwt": -place, "loss_when_learnt": value}
        for place, value in enumerate(order)
    ]
    (found,) = rank_correlations(rows)
    assert found["p_with_acc"] == pytest.approx(sum(going_as_far) / 120)
    assert found["p_with_bwt"] == found["p_with_acc"]
    assert found["rank_correlation_with_bwt"] == pytest.approx(-found["rank_correlation_with_acc"])
    assert found["runs"] == 5


def test_reference_methods_are_left_out() -> None:
    rows = [{"method": method} for method in ("oracle", "er", "finetune", "gpm", "multitask")]
    assert [row["method"] for row in without_reference_methods(rows)] == ["er", "gpm"]


def test_too_few_runs_have_no_correlation() -> None:
    assert rank_correlations([]) == []
    assert rank_correlations(rows_of([(1, 2), (2, 1)])) == []
    assert rank_correlations(rows_of([(1, 2), (2, 2), (3, 2)])) == []


def test_only_landscapes_of_every_task_are_compared(tmp_path: Path) -> None:
    whole = write_landscape(write_run(tmp_path / "whole", made_result("er")))
    part = write_landscape(write_run(tmp_path / "part", made_result("gpm")), pairs=[(2, 1), (3, 3)])
    late = write_landscape(write_run(tmp_path / "late", made_result("sgp")), pairs=[(3, 1), (3, 2), (3, 3)])
    early = write_landscape(write_run(tmp_path / "early", made_result("gem")), pairs=[(1, 1), (2, 2), (3, 3)])
    none = write_run(tmp_path / "none", made_result("ewc"))
    rows = compare_runs({run.path: run.result for run in (whole, part, late, early, none)})
    assert [row["method"] for row in rows] == ["er"]


def test_a_landscape_of_deeply_nested_lists_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", made_result("er"))
    (run.path / "landscape.json").write_text("[" * 100_000 + "]" * 100_000, encoding="utf-8")
    with pytest.raises(RunError, match="cannot be read as a landscape"):
        read_landscape(run.path)
