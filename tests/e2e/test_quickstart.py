"""The README's first command: the model learns."""

import json

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import command_here, metrics, quickstart
from tests.unit.commands.report.run_maker import page_data


def test_quickstart_learns(quickstart_run):
    check(quickstart_run, accuracy=0.6, gain=0.15)


@pytest.mark.long
def test_quickstart_as_written_learns(tmp_path):
    check(quickstart(tmp_path / "quickstart"), accuracy=0.8, gain=0.25)


def check(run, accuracy, gain):
    run_dir = run.run_dir
    summary = json.loads((run_dir / "summary.json").read_text())
    # For whoever reads the log of the tests.
    print(json.dumps(summary | {"peak_memory_gib": run.peak_gib}))

    assert summary["eval/accuracy_after"] >= accuracy
    assert summary["eval/accuracy_after"] - summary["eval/accuracy_before"] >= gain
    assert summary["alignment/mean_exp_abs_diff"] <= 1.001
    assert summary["alignment/hf_mean_exp_abs_diff"] <= 1.0001
    assert summary["layout"] == {"tp": 2, "pp": 1, "dp": 1, "cp": 1, "engines": 1}
    assert 1.0 < run.peak_gib < 12.0
    for key in ("steps", "wall_s", "setup_s", "tokens_generated"):
        assert summary[key] is not None
    for name in ("config.yaml", "metrics.jsonl", "curves.png", "hf/config.json"):
        assert (run_dir / name).stat().st_size > 0
    for name in ("tensorboard", "samples", "checkpoints"):
        assert list((run_dir / name).iterdir())
    before = load_file(run_dir / "sft" / "model.safetensors")
    after = load_file(run_dir / "hf" / "model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)
    assert "2 of 2 ranks have their weights" in run.output
    assert "try      bash launchers/quickstart.sh" in run.output
    check_report(run_dir)


def check_report(run_dir):
    """Its page has what the run wrote: every metric, every step, and what the grader decided."""
    command_here("report", str(run_dir))
    (data,) = page_data((run_dir / "report.html").read_text(encoding="utf-8"))["runs"]
    lines = metrics(run_dir)
    assert [answer[1] for answer in data["answers"]] == ["good"] * 3
    assert data["steps"] == [x["step"] for x in lines]
    assert {tag for line in lines for tag in line if "/" in tag} == set(data["metrics"])
    assert all(one["method"] for one in data["samples"]) and data["formulas"]
    assert {one["dropped"] for one in data["samples"]} == {None}
    assert not any("damaged" in note for note in data["notes"])
