"""Where a run's metrics are shown besides its own files: ``runner.trackers``.

A tracker that fails says so once and is left alone from then on: it never stops a run, nor holds it
up. All but TensorBoard work in their own threads, because they talk to servers.
"""

from rlmath.monitor.trackers.base import TrackedRun, Tracker
from rlmath.monitor.trackers.fan_out import PACKAGES, Trackers

__all__ = ["PACKAGES", "TrackedRun", "Tracker", "Trackers"]
