"""A phase observer is told of each phase with its step and seconds, and never stops a run."""

import json
from pathlib import Path

import pytest

from rlmath.config.schema import RunnerConfig
from rlmath.monitor import open_monitor
from rlmath.monitor.phase_observers import PHASE_OBSERVERS
from rlmath.plugins import loading
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "plugins" / "phase_observer.py"


@pytest.fixture(autouse=True)
def forget(own_plugins, monkeypatch):  # noqa: F811
    monkeypatch.setattr(PHASE_OBSERVERS, "_known", {})


def run(folder):
    runner = RunnerConfig(run_dir=str(folder), trackers=[], progress=False)
    with open_monitor(folder, runner, total_steps=2) as monitor:
        for step in (1, 2):
            monitor.begin_step()
            with monitor.phase("generate"), monitor.phase("grade"):
                pass
            monitor.log_step(step, {"x": 1.0})


def test_the_example_writes_a_trace_of_nested_phases(tmp_path):
    loading.use(str(EXAMPLE))
    run(tmp_path)
    *events, end = json.loads((tmp_path / "trace.json").read_text())
    assert end == {}
    seen = [(one["name"], one["args"]["step"]) for one in events]
    assert seen == [("grade", 1), ("generate", 1), ("grade", 2), ("generate", 2)]
    inner, outer = events[:2]
    assert outer["ts"] <= inner["ts"] and inner["dur"] <= outer["dur"]


def test_one_that_fails_warns_once_and_is_called_no_more(tmp_path):
    calls = []

    class Failing:
        def __init__(self, run_dir):
            pass

        def begin(self, phase, step):
            calls.append(phase)
            raise OSError("no room")

    PHASE_OBSERVERS.register("failing")(Failing)
    run(tmp_path)
    assert calls == ["generate"]
    warnings = (tmp_path / "warnings.jsonl").read_text().splitlines()
    assert len(warnings) == 1 and "failing failed" in warnings[0] and "no room" in warnings[0]
