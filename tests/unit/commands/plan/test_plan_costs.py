"""Costs of launches, messages and rings in the planned time, and the table of constants."""

import dataclasses
import json

import pytest

from rlmath.commands.plan import engine_memory, measured, memory, time
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.gpus import GPUS, Efficiency
from rlmath.commands.plan.time import Work, actor_time_s
from rlmath.commands.selfcheck.catalog import CHECKS
from rlmath.commands.selfcheck.record import Outcome
from rlmath.commands.selfcheck.runner import Result
from rlmath.commands.selfcheck.suite import plan_values
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

DENSE, MOE = (model_spec(KNOWN[name]) for name in ("Qwen2.5-7B", "Qwen3-30B-A3B"))
# Work of a rank: 8 micro-batches of 4,096 tokens in one optimizer step.
WORK = Work(8, 1, 1, 96, 4000, 4000)


def update_s(spec, layout, work=WORK, **efficiency):
    actor = ActorShape(layout, 0, 4096)
    return actor_time_s(spec, actor, work, GPUS["h100"], Efficiency(**efficiency), 8)[1]


def test_launches_of_dense_layers_run_beside_kernels_and_those_of_experts_after_them():
    layout = Layout(expert_parallel=1)
    # A dense layer that computes longer than it is launched does not feel the launches.
    dense = update_s(DENSE, layout, layer_launch_s=1e-6)
    assert update_s(DENSE, layout, layer_launch_s=1e-3) == pytest.approx(dense)
    moe = update_s(MOE, layout, layer_launch_s=1e-6)
    added = update_s(MOE, layout, layer_launch_s=1e-3) - moe
    assert added == pytest.approx(3 * 8 * MOE.layers * (1e-3 - 1e-6), rel=1e-6)


def test_a_pipeline_message_costs_its_latency():
    layout, work = Layout(pipeline_parallel=2), dataclasses.replace(WORK, prompts=8)
    found = {cost: update_s(DENSE, layout, work, pipeline_message_s=cost) for cost in (0.0, 1e-3)}
    # Each of 8 micro-batches goes in and out, forward and backward; stages wait for one more.
    assert found[1e-3] - found[0.0] == pytest.approx(4 * 8 * 1e-3 * (1 + 1 / 8), rel=0.02)
    alone = [update_s(DENSE, Layout(), pipeline_message_s=cost) for cost in (0.0, 1e-3)]
    assert alone[0] == alone[1]


def test_a_context_rank_costs_a_launch_per_layer_and_pass():
    for ranks in (1, 2, 4):
        layout = Layout(context_parallel=ranks)
        less, more = (update_s(DENSE, layout, context_step_s=cost) for cost in (0.0, 1e-3))
        passes = 3 * 8 * DENSE.layers
        assert more - less == pytest.approx((ranks - 1) * passes * 1e-3, rel=0.02, abs=1e-9)


def test_every_constant_has_its_run_and_is_the_one_that_plans_take():
    table = measured.read_table()
    assert all(set(entry) == {"value", "run"} and entry["run"] for entry in table.values())
    for one in dataclasses.fields(Efficiency):
        assert one.default == table[one.name]["value"]
    others = table.keys() - {one.name for one in dataclasses.fields(Efficiency)}
    assert others == {"free_share", "actor_process_gib", "engine_process_gib"}
    assert table["actor_process_gib"]["value"] == memory.ACTOR_PROCESS_GIB
    assert table["engine_process_gib"]["value"] == engine_memory.ENGINE_PROCESS_GIB
    assert time.Efficiency is Efficiency


def test_a_selfcheck_corrects_the_table(tmp_path):
    def figure(name, value):
        return {"name": name, "value": value, "unit": "", "limit": "", "key": False}

    passed = Outcome(figures=[figure("plan: mfu", 0.41234), figure("GB/s", 3.0)], ended=True)
    failed = Outcome(figures=[figure("plan: link", 0.01)], ended=False)
    results = [
        Result(check, one, 1.0, "") for check, one in zip(CHECKS, (passed, failed), strict=False)
    ]
    values = plan_values(results)
    assert values == {"mfu": 0.41234}
    path = tmp_path / "measured.json"
    path.write_text(measured.TABLE.read_text(encoding="utf-8"), encoding="utf-8")
    measured.correct(values, "8 x H100, 2027-01-01", path)
    before, after = measured.read_table(), measured.read_table(path)
    assert after["mfu"] == {"value": 0.412, "run": "8 x H100, 2027-01-01"}
    assert {k: v for k, v in after.items() if k != "mfu"} == {
        k: v for k, v in before.items() if k != "mfu"
    }
    assert json.loads(path.read_text()) == after
    with pytest.raises(KeyError, match="speed"):
        measured.correct({"speed": 1.0}, "", path)
