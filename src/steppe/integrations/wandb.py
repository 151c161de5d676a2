"""Weights & Biases: curves of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from steppe.integrations.requirements import require
from steppe.integrations.tracker import Point, Tracker


class WandbLogger(Tracker):
    """Logs to a run of Weights & Biases. Whether it is online is set by `WANDB_MODE`.

    Args:
        run_id: An existing run to continue; by default a new one is created.
        name: The name of a new run.
        project: The project.
        directory: Where W&B keeps its local files; by default where it always does.
        lr: The learning rate that training starts with, to log it.
        config: Settings to record.
        points: The last point of each curve, which `points` of an earlier logger gave. W&B itself knows the last step
            of all only, and offline not even that.

    Attributes:
        run_id: The run.

    Raises:
        UsageError: wandb is not installed.
    """

    title = "Weights & Biases"

    def __init__(
        self,
        run_id: str | None = None,
        *,
        name: str | None = None,
        project: str = "steppe",
        directory: str | Path | None = None,
        lr: float | None = None,
        config: Mapping[str, object] | None = None,
        points: Mapping[str, Point] | None = None,
    ) -> None:
        require("WandbLogger", "wandb", "wandb")
        import wandb

        super().__init__(lr)
        self._run = wandb.init(
            project=project,
            id=run_id,
            name=name,
            dir=None if directory is None else str(directory),
            config=dict(config or {}),
            resume=None if run_id is None else "allow",
            reinit="create_new",
        )
        self.run_id = str(self._run.id)
        self._before = dict(points or {})

    @property
    def points(self) -> dict[str, Point]:
        """The last point of each curve."""
        return {**self._before, **{name: point for name, point in self._points.items() if point is not None}}

    def _write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def _read_last(self, name: str) -> Point | None:
        if name in self._before:
            return self._before[name]
        # Of a run that is resumed online, W&B drops everything up to its last step.
        return (self._run.starting_step - 1, float("nan")) if self._run.starting_step else None

    def _flush(self) -> None:
        """W&B writes by itself."""

    def _close(self) -> None:
        self._run.finish()
