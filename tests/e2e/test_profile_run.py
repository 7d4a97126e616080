"""``runner.profile`` in a resumed run: traces with the phases, linked by the report, and the same
model."""

import gzip
import json

from safetensors.torch import load_file

from tests.e2e.runs import metrics, quickstart_settings, rlmath
from tests.unit.commands.report.run_maker import page_data


def train(material, run_dir, *more):
    common = [
        *quickstart_settings(material, run_dir),
        *("actor.optimizer.schedule=constant", "eval.every=0", "runner.check_export_sequences=0"),
        *("runner.save_every=1", "runner.keep_checkpoints=3"),
    ]
    run = rlmath("train", *common, *more)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def names_in(trace):
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event.get("name") for event in events]


def test_a_profiled_step_is_the_same_and_has_a_trace_of_each_process(material, tmp_path):
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    train(material, plain)
    first = plain / "checkpoints" / "step_000001"
    out = train(
        material, profiled, f"runner.resume={first}", "runner.profile={steps: [2], tool: torch}"
    )
    assert "profile  step 2" in out

    folder = profiled / "profile"
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    # On a CPU vLLM writes a table as well.
    traces = sorted((folder / "step_000002").glob("*.json.gz"))
    engine, *ranks = [path.name for path in traces]
    assert engine.startswith("engine_0_") and ranks == ["rank_0.json.gz", "rank_1.json.gz"]
    for trace in traces[1:]:
        names = names_in(trace)
        phases = {name: names.count(name) for name in ("log_probs", "update", "weight_sync")}
        assert phases == {"log_probs": 1, "update": 1, "weight_sync": 1}
    assert any(str(name).startswith("aten::") for name in names_in(traces[0]))

    assert rlmath("report", str(profiled)).returncode == 0
    page = (profiled / "report.html").read_text(encoding="utf-8")
    (run,) = page_data(page)["runs"]
    assert {name for name, _ in run["traces"]} >= {f"step_000002/{one.name}" for one in traces}
    assert all((profiled / link).is_file() for _, link in run["traces"])

    tags = ("train/loss", "train/grad_norm", "rollout/rewards", "alignment/mean_exp_abs_diff")
    of_plain, of_profiled = (metrics(run_dir)[-1] for run_dir in (plain, profiled))
    assert of_plain["step"] == of_profiled["step"] == 2
    assert [of_profiled[tag] for tag in tags] == [of_plain[tag] for tag in tags]
    before, after = (
        load_file(run_dir / "hf" / "model.safetensors") for run_dir in (plain, profiled)
    )
    assert all((before[name] == after[name]).all() for name in before)
