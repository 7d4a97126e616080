"""The metrics of a running run for Prometheus: ``http://127.0.0.1:PORT/metrics``.

Text exposition format 0.0.4. Every tag of ``docs/metrics.md`` is the gauge ``rlmath_metric`` with
the label ``tag``, so that a metric has one name in all places; what a dashboard or an alert needs
of the run itself has other names (:data:`RUN_METRICS`).
"""

from __future__ import annotations

import http.server
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlmath.monitor.sampling import SamplingProgress

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
    """Serves what it was last told, in a thread.

    Args:
        port: To listen at; 0: any free one.
        run: The run's name, a label of everything.
        total_steps: Number of the run's last step.
        address: To listen at; the default is reached from this machine alone.
        sampling: How far the engines are, asked whenever the metrics are.

    Attributes:
        port: That it listens at.

    Raises:
        OSError: The port is taken.
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
        self._server = _Server((address, port), _handler(self.text))
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def phase(self, name: str) -> None:
        """The run enters this phase."""
        with self._lock:
            self._phase, self._phase_began_s = name, time.time()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done. A metric that it does not have keeps its last value."""
        with self._lock:
            self._values["rlmath_step"] = step
            self._values["rlmath_step_end_seconds"] = time.time()
            self._metrics.update(metrics)

    def warning(self) -> None:
        """The run warned."""
        with self._lock:
            self._values["rlmath_warnings_total"] += 1

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        with self._lock:
            values, metrics = dict(self._values), dict(self._metrics)
            phase, began_s = self._phase, self._phase_began_s
        sampling = self._sampling()
        if sampling is not None:
            values["rlmath_samples_done"] = sampling.done
            values["rlmath_samples_wanted"] = sampling.wanted
            values["rlmath_response_tokens_total"] = sampling.tokens
        run = {"run": self._run}
        samples: dict[str, list[tuple[dict[str, str], float]]] = {
            name: [(run, value)] for name, value in values.items()
        }
        samples["rlmath_phase_info"] = [({**run, "phase": phase}, 1.0)]
        samples["rlmath_phase_start_seconds"] = [(run, began_s)]
        samples[METRIC] = [({**run, "tag": tag}, metrics[tag]) for tag in sorted(metrics)]
        lines = []
        for name, (kind, help_) in RUN_METRICS.items():
            if samples.get(name):
                lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]
                lines += [f"{name}{_labels(own)} {_number(v)}" for own, v in samples[name]]
        return "\n".join([*lines, ""])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True  # A run that restarts takes its port again.


def _handler(text: Callable[[], str]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = text().encode() if found else b"the metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Not to the run's terminal."""

    return Handler


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, text in labels.items()
    )
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
