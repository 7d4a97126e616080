"""A tracker: all metrics as one CSV file in the run's folder.

rlmath train experiment=quickstart runner.trackers='[examples/plugins/tracker.py:CsvTracker]'
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.monitor.trackers import TRACKERS, TrackedRun


@TRACKERS.register("csv")
class CsvTracker:
    """Rows of step, metric and value."""

    def __init__(self, run: TrackedRun) -> None:
        resumes = run.last_step is not None
        self._file = (run.folder / "metrics.csv").open("a" if resumes else "w", newline="")
        self._rows = csv.writer(self._file)
        if not resumes:
            self._rows.writerow(["step", "metric", "value"])

    def settings(self, text: str, values: Mapping[str, Any], compared_by: Sequence[str]) -> None:
        """A table has no place for them."""

    def step(
        self, step: int, time_s: float, values: Mapping[str, float], texts: Mapping[str, str]
    ) -> None:
        """One row for each metric."""
        self._rows.writerows([step, name, value] for name, value in sorted(values.items()))

    def close(self) -> None:
        self._file.close()
