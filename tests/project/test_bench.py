"""The measurements under bench/ still start: they are run rarely, and what they import may move."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from steppe.registry import METHODS

BENCH = Path(__file__).parents[2] / "bench"


def test_imports_of_every_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in this process."""
    names = sorted(file.stem for file in BENCH.glob("*.py"))
    assert "basis_update" in names
    monkeypatch.syspath_prepend(BENCH)
    failed = {}
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                failed[name] = str(error)
    finally:
        for name in names:
            sys.modules.pop(name, None)
        METHODS.pop("fragile", None)  # one of them is a plugin
    assert failed == {}
