"""The metrics of a running run for Prometheus: ``http://127.0.0.1:PORT/metrics``.

Every tag of ``docs/metrics.md`` is the gauge ``rlmath_metric`` with
the label ``tag``, so that a metric has one name everywhere; figures of the run itself, for
dashboards and alerts, have separate names (:data:`RUN_METRICS`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rlmath.monitor.sampling import SamplingProgress

if TYPE_CHECKING:
    from prometheus_client import Metric

METRIC = "rlmath_metric"
# Name, type and help.
RUN_METRICS = {
    "rlmath_step": ("gauge", "The last step that is done."),
    "rlmath_steps": ("gauge", "The number of the run's last step."),
    "rlmath_step_end_seconds": ("gauge", "Unix time at which the last step was done."),
    "rlmath_warnings_total": ("counter", "Warnings since the process began."),
    "rlmath_phase_info": ("gauge", "1 for the phase that the run is in."),
    "rlmath_phase_start_seconds": ("gauge", "Unix time at which that phase began."),
    "rlmath_samples_done": ("gauge", "Samples of the present round that are generated."),
    "rlmath_samples_wanted": ("gauge", "Samples that it asked for so far."),
    "rlmath_response_tokens_total": ("counter", "Response tokens since the engines started."),
    METRIC: ("gauge", "A metric of the last step, by its tag in docs/metrics.md."),
}


class MetricsServer:
    """Serves the last metrics, in a thread. Raises OSError: the port is taken.

    Args:
        port: 0: any free one.
        address: The default is reached from this machine alone.
        sampling: Progress of the engines, asked at each scrape.
    """

    def __init__(
        self,
        port: int,
        run: str,
        total_steps: int,
        address: str = "127.0.0.1",
        sampling: Callable[[], SamplingProgress | None] = lambda: None,
    ) -> None:
        self._run, self._sampling = run, sampling
        self._lock = threading.Lock()
        self._values: dict[str, float] = {"rlmath_steps": total_steps, "rlmath_warnings_total": 0}
        self._phase = "starting"
        self._phase_began_s = time.time()
        self._metrics: dict[str, float] = {}
        # Only where there is a port: it takes a moment to import.
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, address, registry)
        self.port = self._server.server_port

    def phase(self, name: str) -> None:
        with self._lock:
            self._phase, self._phase_began_s = name, time.time()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the metrics of a finished step; the others keep their last values."""
        with self._lock:
            self._values["rlmath_step"] = step
            self._values["rlmath_step_end_seconds"] = time.time()
            self._metrics.update(metrics)

    def warning(self) -> None:
        with self._lock:
            self._values["rlmath_warnings_total"] += 1

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import Metric

        with self._lock:
            values, metrics = dict(self._values), dict(self._metrics)
            phase, began_s = self._phase, self._phase_began_s
        sampling = self._sampling()
        if sampling is not None:
            values["rlmath_samples_done"] = sampling.done
            values["rlmath_samples_wanted"] = sampling.wanted
            values["rlmath_response_tokens_total"] = sampling.tokens
        run = {"run": self._run}
        samples = {name: [(run, value)] for name, value in values.items()}
        samples["rlmath_phase_info"] = [({**run, "phase": phase}, 1.0)]
        samples["rlmath_phase_start_seconds"] = [(run, began_s)]
        samples[METRIC] = [({**run, "tag": tag}, metrics[tag]) for tag in sorted(metrics)]
        for name, (kind, help_) in RUN_METRICS.items():
            family = Metric(name.removesuffix("_total"), help_, kind)
            for labels, value in samples.get(name, ()):
                family.add_sample(name, labels, value)
            if family.samples:
                yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
