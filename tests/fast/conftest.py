"""Tests of fast paths take them, whatever the environment says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from steppe.fast.switch import fast_paths


@pytest.fixture(autouse=True)
def _fast_paths_enabled() -> Iterator[None]:
    with fast_paths(True):
        yield
