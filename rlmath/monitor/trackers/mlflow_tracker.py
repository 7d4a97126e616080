from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.monitor.trackers.base import TRACKERS, TrackedRun, TrackerTraits

# Limits of one call to the server, by its API.
_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 1000, 100, 6000


@TRACKERS.register("mlflow", traits=TrackerTraits("mlflow"))
class MlFlow:
    """A run of MLflow on the server of ``MLFLOW_TRACKING_URI``; without that, in
    ``<run_dir>/mlflow.db``."""

    def __init__(self, run: TrackedRun) -> None:
        client: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        place = os.environ.get("MLFLOW_TRACKING_URI")
        place = place or f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        self._client = client.MlflowClient(tracking_uri=place)
        self._id = run.id_of("mlflow")
        if self._id is None:
            experiment = self._client.get_experiment_by_name(run.project)
            number = (
                self._client.create_experiment(run.project)
                if experiment is None
                else experiment.experiment_id
            )
            self._id = str(self._client.create_run(number, run_name=run.name).info.run_id)
            run.keep_id("mlflow", self._id)
        else:
            self._client.update_run(self._id, status="RUNNING")

    def settings(self, text: str, values: Mapping[str, Any], compared_by: Sequence[str]) -> None:
        """As parameters; those that a resume changed keep their first value, as MLflow has it."""
        known = self._client.get_run(self._id).data.params
        new = [
            self._entities.Param(key, str(value)[:_MOST_CHARACTERS])
            for key, value in values.items()
            if key not in known
        ]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _MOST_PARAMS])

    def step(
        self, step: int, time_s: float, values: Mapping[str, float], texts: Mapping[str, str]
    ) -> None:
        found = [
            self._entities.Metric(tag, value, int(time_s * 1000), step)
            for tag, value in values.items()
            if math.isfinite(value)
        ]
        for first in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=found[first : first + _MOST_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)
