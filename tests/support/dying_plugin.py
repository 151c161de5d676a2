"""A plugin whose method records a lot after each task and is killed while doing so, for every fourth seed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import steppe
from steppe.methods.finetune import Finetune
from steppe.network.network import Network
from steppe.projection.layers import ProjectedWeight
from steppe.runtime.rng import Streams


@dataclass(frozen=True)
class Dying(Finetune):
    """Settings of the dying method: Finetune's, how much it records, and when it dies."""

    told: int = steppe.setting(3_000_000, "bytes that it tells after each task", at_least=0)
    after: float = steppe.setting(1.0, "seconds from the first telling to the end", at_least=0)

    def start(self, network: Network, covered: Mapping[str, ProjectedWeight], streams: Streams) -> steppe.Method:
        """Finetune, killed for every fourth seed."""
        method = super().start(network, covered, streams)

        def record() -> dict[str, Any]:
            if streams.seed % 4 == 0:
                threading.Timer(self.after, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return {"much": "x" * self.told}

        method.diagnostics = record  # type: ignore[method-assign]
        return method


steppe.register_method("dying", Dying, "Finetune that is killed with every fourth seed.")
