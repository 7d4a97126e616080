"""Output of a run: metrics, samples, curves, a display, a summary."""

from rlmath.monitor.curves import plot_curves
from rlmath.monitor.monitor import WARNINGS_FILE, Listeners, Monitor, open_monitor
from rlmath.monitor.progress import ProgressDisplay
from rlmath.monitor.samples import read_samples, write_samples
from rlmath.monitor.summary import read_summary, update_summary
from rlmath.monitor.timing import PhaseTimer
from rlmath.monitor.writer import DECISIONS_FILE, MetricsWriter, read_metrics, set_aside
