"""The quickstart with a tool: a model that guesses products learns to call Python."""

import json

import pytest

from rlmath.monitor.samples import read_samples
from tests.e2e.runs import command_here, metrics, python
from tests.unit.commands.report.run_maker import page_data


@pytest.mark.long
def test_a_model_learns_to_use_the_python_tool(tmp_path):
    run_dir = tmp_path / "run"
    done = python(
        *("-m", "rlmath.quickstart.run", "experiment=quickstart_tools"),
        f"runner.run_dir={run_dir}",
        timeout_s=1500,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["eval/accuracy_before"] < 0.1 and summary["eval/accuracy_after"] > 0.8
    assert summary["alignment/mean_exp_abs_diff"] <= 1.001
    steps = [line for line in metrics(run_dir) if "train/loss" in line]
    assert steps[0]["tools/calls"] < 0.3 and steps[-1]["tools/calls"] > 0.8
    assert steps[0]["rollout/accuracy"] < 0.2 and steps[-1]["rollout/accuracy"] > 0.8
    assert all(line["tools/failed_share"] == 0 for line in steps)
    # It is the tool that answers, not the model's head.
    rows = list(read_samples(run_dir / "samples" / f"step_{len(steps):06d}.jsonl"))
    assert all(row.get("calls") for row in rows if row["correct"])
    command_here("report", str(run_dir))
    (data,) = page_data((run_dir / "report.html").read_text(encoding="utf-8"))["runs"]
    assert any(len(one["response"]) == 3 for one in data["samples"])
