"""What replay methods share: SGD, and a buffer that every batch of a task's first epoch is added to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from steppe.methods.parts.reservoir import Reservoir
from steppe.methods.parts.sgd_method import SGDConfig, SGDMethod
from steppe.network.network import Network
from steppe.runtime.rng import Streams
from steppe.settings import setting
from steppe.tensors.batch import Batch


@dataclass(frozen=True)
class ReplayConfig(SGDConfig):
    """Settings of SGD, and the size of the buffer."""

    buffer: int = setting(200, "replay buffer size in samples", at_least=1)


ReplayConfigT = TypeVar("ReplayConfigT", bound=ReplayConfig)


class ReplayMethod(SGDMethod[ReplayConfigT]):
    """A method with a replay buffer, `replay`.

    Args:
        settings: The method's settings.
        network: The network to train.
        streams: The random streams of the run.
    """

    state_attrs = ("descent", "replay")

    def __init__(self, settings: ReplayConfigT, network: Network, streams: Streams) -> None:
        super().__init__(settings, network)
        self.replay = Reservoir.from_streams(settings.buffer, streams)

    def after_batch(self, batch: Batch) -> None:
        self.replay.add(batch)

    def memory_bytes(self) -> dict[str, int]:
        return {"replay": self.replay.memory_bytes(), "bases": 0}
