"""Which methods learn one task after another: among these a report looks for the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SEE_AGAIN = ("multitask", "oracle")  # what results of older versions do not say


def learns_in_order(result: Mapping[str, Any]) -> bool:
    """Whether a run saw each task once, in its turn, as its result says: Multitask and Oracle see earlier ones whole
    again, and Oracle has a BWT all the same.
    """
    schedule = result.get("schedule", "joint" if result["method"] in _SEE_AGAIN else "sequential")
    return bool(schedule == "sequential")
