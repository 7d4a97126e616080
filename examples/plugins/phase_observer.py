"""A phase observer: the phases as a trace for chrome://tracing or Perfetto.

rlmath train experiment=quickstart plugins='[examples/plugins/phase_observer.py]'
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rlmath.monitor.phase_observers import PHASE_OBSERVERS


@PHASE_OBSERVERS.register("chrome_trace")
class ChromeTrace:
    """Writes ``trace.json`` in the run's folder, one event for each phase."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / "trace.json").open("w")
        self._file.write("[\n")

    def begin(self, phase: str, step: int) -> None:
        """The event is written at the phase's end."""

    def end(self, phase: str, step: int, seconds: float) -> None:
        start_us = (time.perf_counter() - seconds) * 1e6
        event = {"name": phase, "ph": "X", "ts": start_us, "dur": seconds * 1e6, "pid": 0, "tid": 0}
        self._file.write(json.dumps(event | {"args": {"step": step}}) + ",\n")

    def close(self) -> None:
        self._file.write("{}]\n")
        self._file.close()
