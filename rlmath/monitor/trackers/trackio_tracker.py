"""Trackio, by its client ``trackio``: local unless ``TRACKIO_SPACE_ID`` names a Space."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.monitor.trackers.base import TRACKERS, TrackedRun, TrackerTraits


@TRACKERS.register("trackio", traits=TrackerTraits("trackio"))
class Trackio:
    """A run of Trackio, in its local store or in the Space that its variable names."""

    def __init__(self, run: TrackedRun) -> None:
        self._client: Any = importlib.import_module("trackio")
        self._run = run
        self._begun: Any = None

    def settings(self, text: str, values: Mapping[str, Any], compared_by: Sequence[str]) -> None:
        self._begin(values)

    def step(
        self, step: int, time_s: float, values: Mapping[str, float], texts: Mapping[str, str]
    ) -> None:
        if self._begun is None:
            self._begin({})
        finite = {tag: value for tag, value in values.items() if math.isfinite(value)}
        self._begun.log(finite, step=step)

    def close(self) -> None:
        if self._begun is not None:
            self._begun.finish()

    def _begin(self, values: Mapping[str, Any]) -> None:
        """Trackio takes the settings when a run begins."""
        name = self._run.id_of("trackio")
        self._begun = self._client.init(
            project=self._run.project,
            name=name or self._run.name,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=dict(values),
            resume="allow" if name else "never",
            embed=False,
        )
        self._run.keep_id("trackio", str(self._begun.name))
