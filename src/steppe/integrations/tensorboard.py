"""TensorBoard: curves in event files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from steppe.integrations.requirements import require
from steppe.integrations.tracker import Point, Tracker


class TensorBoardLogger(Tracker):
    """Logs to a directory that `tensorboard --logdir` shows. An existing one is continued.

    Args:
        directory: The directory.
        lr: The learning rate that training starts with, to log it.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    title = "TensorBoard"

    def __init__(self, directory: str | Path, *, lr: float | None = None) -> None:
        require("TensorBoardLogger", "tensorboard", "tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        super().__init__(lr)
        self._before: dict[str, Point] = {}
        if Path(directory).is_dir():
            events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
            for name in events.Tags()["scalars"]:
                latest = max(events.Scalars(name), key=lambda point: point.step)
                self._before[name] = (latest.step, latest.value)
        self._writer = EventFileWriter(str(directory))

    def _write(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _read_last(self, name: str) -> Point | None:
        return self._before.get(name)

    def _flush(self) -> None:
        self._writer.flush()

    def _close(self) -> None:
        self._writer.close()
