"""Tests of fast paths enable them, whatever the environment says."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fast(fast_paths_on: None) -> None:
    pass
