"""Fixtures that several tests of run directories share."""

from __future__ import annotations

from plugin_runs import downloaded, plugin_runs  # noqa: F401
