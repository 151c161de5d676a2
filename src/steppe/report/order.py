"""Which methods learn one task after another: among these a report looks for the best."""

from __future__ import annotations

import steppe.methods  # noqa: F401 - they announce themselves
from steppe.registry import METHODS


def learns_in_order(method: str) -> bool:
    """Whether a method sees each task once, in its turn: Multitask and Oracle see earlier ones whole again.

    A result does not say so, for Oracle has a BWT too. No plugin is loaded for it: a method unknown here counts as one
    that learns in order.
    """
    known = METHODS.get(method)
    return known is None or getattr(known.settings, "schedule", "sequential") == "sequential"
