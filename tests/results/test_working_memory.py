"""Memory that must be kept between tasks, and memory that can be rebuilt from it."""

from __future__ import annotations

import pytest
from made_runs import made_result

from steppe.registry import METHODS
from steppe.results.schema import RunResult
from steppe.results.tables import summary

HELD = {"replay": 1000, "bases": 200, "importances": 30}


@pytest.mark.parametrize(
    ("method", "working", "kept"),
    [
        ("fs-dgpm", None, 1000),  # a result of an older version, which does not say so
        ("gpm", None, 1230),  # its bases grow with every task and follow from nothing that is kept
        ("fs-rgpm", ["bases", "importances"], 1000),
        ("mine", None, 1230),
        ("mine", ["importances"], 1200),
    ],
)
def test_kept_and_working(method: str, working: list[str] | None, kept: int) -> None:
    data = {**made_result(method), "bytes": HELD, **({} if working is None else {"working": working})}
    result = RunResult.from_dict(data)
    assert (result.kept_bytes, result.working_bytes, result.memory_bytes) == (kept, 1230 - kept, 1230)
    assert RunResult.from_dict(result.as_dict()) == result
    assert ("working memory: " in summary(result)) == (kept < 1230)


def test_older_results_are_read_as_the_methods_say_today() -> None:
    for name, entry in METHODS.items():
        read = RunResult.from_dict({**made_result(name), "bytes": HELD}).working
        assert read == list(entry.settings.working_memory) or name == "fs-rgpm"  # never recorded without
