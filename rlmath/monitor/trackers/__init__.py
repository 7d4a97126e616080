"""Where a run's metrics are shown besides its own files: ``runner.trackers``.

A tracker that fails says so once and is left alone from then on: it never stops a run, nor holds it
up. All but TensorBoard work in their own threads, because they talk to servers.
"""

from rlmath.monitor.trackers.base import TRACKERS, TrackedRun, Tracker, TrackerTraits
from rlmath.monitor.trackers.fan_out import Trackers
from rlmath.monitor.trackers.mlflow_tracker import MlFlow
from rlmath.monitor.trackers.swanlab_tracker import SwanLab
from rlmath.monitor.trackers.tensorboard import TensorBoard
from rlmath.monitor.trackers.trackio_tracker import Trackio
from rlmath.monitor.trackers.weights_and_biases import WeightsAndBiases
