"""``runner.profile``: traces with the phases, linked by the report, and the same run; nor do tools
that nobody calls change it."""

import gzip
import json

import pytest

from tests.e2e import golden_curve
from tests.e2e.runs import command_here, rlmath
from tests.unit.commands.report.run_maker import page_data


def names_in(trace):
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event.get("name") for event in events]


@pytest.mark.long
def test_a_profiled_step_is_the_same(material, learning_run, tmp_path):
    """By its curve as well: test_golden_curve.py."""
    run = rlmath("train", *golden_curve.beginning(material, tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert golden_curve.digests(tmp_path) == golden_curve.digests(learning_run)


def test_a_profiled_step_has_a_trace_of_each_process(learning_run):
    """Several ranks: tests/distributed/test_profiled_ranks.py."""
    folder = learning_run / "profile"
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    # On a CPU vLLM writes a table as well.
    traces = sorted((folder / "step_000002").glob("*.json.gz"))
    engine, rank = traces
    assert engine.name.startswith("engine_0_") and rank.name == "rank_0.json.gz"
    names = names_in(rank)
    phases = {name: names.count(name) for name in ("log_probs", "update", "weight_sync")}
    assert phases == {"log_probs": 1, "update": 1, "weight_sync": 1}
    assert any(str(name).startswith("aten::") for name in names_in(engine))

    command_here("report", str(learning_run))
    page = (learning_run / "report.html").read_text(encoding="utf-8")
    (shown,) = page_data(page)["runs"]
    assert {name for name, _ in shown["traces"]} >= {f"step_000002/{one.name}" for one in traces}
    assert all((learning_run / link).is_file() for _, link in shown["traces"])
