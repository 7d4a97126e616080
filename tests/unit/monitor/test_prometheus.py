import json
import math
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlmath.checks.trackers import tracker_problems
from rlmath.config.load import load
from rlmath.config.schema import RunnerConfig
from rlmath.monitor import open_monitor
from rlmath.monitor.prometheus import METRIC, RUN_METRICS, MetricsServer
from rlmath.monitor.sampling import SamplingProgress
from tests.unit.monitor.test_metrics_page import DOCUMENTED

DASHBOARD = Path(__file__).parents[3] / "docker" / "grafana.json"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port):
    """As Prometheus reads it: samples by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_running_run_is_scraped(tmp_path):
    port = free_port()
    runner = RunnerConfig(run_dir=str(tmp_path / "mine"), metrics_port=port, trackers=[])
    found = []
    with open_monitor(
        tmp_path / "mine", runner, total_steps=9, sampling=lambda: found[0] if found else None
    ) as monitor:
        before = scrape(port)
        assert before["rlmath_steps"] == [({"run": "mine"}, 9.0)]
        assert "rlmath_step" not in before and "rlmath_samples_done" not in before
        found.append(SamplingProgress(3, 8, 120, (2, 3)))
        with monitor.phase("generate"):
            during = scrape(port)
        monitor.warn("look")
        monitor.log_step(4, {"rollout/rewards": -0.5, "train/kl": math.nan, "x/y": math.inf})
        after = scrape(port)
    assert during["rlmath_phase_info"] == [({"run": "mine", "phase": "generate"}, 1.0)]
    assert during["rlmath_samples_done"][0][1] == 3 and during["rlmath_samples_wanted"][0][1] == 8
    assert during["rlmath_response_tokens_total"][0][1] == 120
    values = {labels["tag"]: value for labels, value in after[METRIC]}
    assert values["rollout/rewards"] == -0.5 and values["x/y"] == math.inf
    assert math.isnan(values["train/kl"]) and "timing/step" in values
    assert after["rlmath_step"][0][1] == 4 and after["rlmath_warnings_total"][0][1] == 1
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_labels_are_escaped():
    server = MetricsServer(0, 'a"b\\c\nd', 1)
    try:
        assert scrape(server.port)["rlmath_steps"][0][0] == {"run": 'a"b\\c\nd'}
    finally:
        server.close()


def test_prometheus_server_binds_to_localhost():
    server = MetricsServer(0, "run", 1)
    try:
        assert server._server.server_address[0] == "127.0.0.1"
    finally:
        server.close()


def test_off_by_default_and_a_port_that_is_taken_is_refused():
    assert RunnerConfig(run_dir="x").metrics_port is None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load(["experiment=quickstart", f"runner.metrics_port={port}"])
        (said,) = tracker_problems(config)
    assert f"127.0.0.1:{port}" in said
    assert list(tracker_problems(config)) == []


def expressions(panels):
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_what_there_is():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found = expressions(dashboard["panels"])
    assert len(found) > 20
    for expression in found:
        names = set(re.findall(r"\brlmath_\w+", expression))
        assert names and names <= set(RUN_METRICS), expression
        assert ('{run=~"$run"' in expression) and expression.count("(") == expression.count(")")
        tags = re.findall(r'tag="([^"]+)"', expression)
        assert len(tags) == (METRIC in names)
        assert set(tags) <= DOCUMENTED, expression
    used = {name for expression in found for name in re.findall(r"\brlmath_\w+", expression)}
    assert used == set(RUN_METRICS)
