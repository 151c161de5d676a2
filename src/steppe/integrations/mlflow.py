"""MLflow: curves as metrics of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from steppe.errors import UsageError
from steppe.integrations.requirements import require
from steppe.integrations.tracker import Point, Tracker

_EXPERIMENT = "steppe"


class MLflowLogger(Tracker):
    """Logs to a run of MLflow.

    Args:
        run_id: An existing run to continue; by default a new one is created.
        name: The name of a new run.
        tracking_uri: Where runs are kept; by default what MLflow is set to, as by `MLFLOW_TRACKING_URI`.
        lr: The learning rate that training starts with, to log it.
        config: Settings to record with a new run.

    Attributes:
        run_id: The run.

    Raises:
        UsageError: MLflow is not installed, or the run does not exist.
    """

    title = "MLflow"

    def __init__(
        self,
        run_id: str | None = None,
        *,
        name: str | None = None,
        tracking_uri: str | None = None,
        lr: float | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        require("MLflowLogger", "mlflow", "mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        super().__init__(lr)
        self._client = MlflowClient(tracking_uri)
        if run_id is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            run_id = self._client.create_run(number, run_name=name).info.run_id
            params = [Param(key, str(value)) for key, value in (config or {}).items()]
            self._client.log_batch(run_id, params=params)
        else:
            try:
                self._client.update_run(run_id, status="RUNNING")
            except MlflowException as error:
                raise UsageError(f"the MLflow run {run_id!r} cannot be continued: {error}") from error
        self.run_id = run_id

    def _write(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in values.items()])

    def _read_last(self, name: str) -> Point | None:
        history = self._client.get_metric_history(self.run_id, name)
        return max(((point.step, point.value) for point in history), default=None)

    def _flush(self) -> None:
        """MLflow writes at once."""

    def _close(self) -> None:
        self._client.set_terminated(self.run_id)
