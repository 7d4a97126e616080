"""The plan's closed form against counts of real ranks on meta tensors, for every GPU preset.

What is counted has Megatron's own layers; ``benchmarks/dry_run`` says what
a count proves.
"""

import dataclasses
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.dry_run.compare import rows
from benchmarks.dry_run.jobs import PHASES
from benchmarks.dry_run.presets import gpu_models, layout_cases, preset_cases
from benchmarks.dry_run.rank import rank_of_largest_piece

# The plain command counts some of the layers of this model's presets.
FEW_LAYERS = 8
COUNTED_WHOLE = ("qwen2.5-1.5b-grpo-megatron (128 GPUs)",)


def with_few_layers(case):
    """Memory is linear in layers, as the one that is counted whole shows."""
    if case.layers is not None or case.name in COUNTED_WHOLE:
        return case
    return dataclasses.replace(case, name=f"{case.name}, few layers", layers=FEW_LAYERS)


WHOLE = [*preset_cases(), *layout_cases()]
CASES = list(dict.fromkeys([*map(with_few_layers, WHOLE), *WHOLE]))
MOST_ERROR = 0.10


# The plain command still counts every kind of model and of layout but virtual stages, each setting
# that changes a phase but actor.offload_in_backward, and an experiment on 128 GPUs. These repeat a
# model's copies, another size of a model, the 7B experiment, or a layout in another size; or count
# all layers and not few, or a setting alone that another case has beside others.
LONG = {
    *(case.name for case in WHOLE if with_few_layers(case) != case),
    *(
        with_few_layers(case).name
        for case in preset_cases()
        if "(128 GPUs)" in case.name and "grpo" not in case.name
    ),
    "r1_distill_qwen_7b (8 GPUs), few layers",
    "qwen2.5_7b (8 GPUs), few layers",
    "llama3.1_8b (8 GPUs), few layers",
    "qwen3_8b (8 GPUs), few layers",
    "qwen2.5-1.5b-grpo-megatron (8 GPUs), few layers",
    "qwen2.5-1.5b-grpo-megatron (1,024 GPUs), few layers",
    "qwen2.5-7b-grpo-megatron (8 GPUs), few layers",
    "qwen2.5-7b-grpo-megatron (1,024 GPUs), few layers",
    "1.5B CP 4, odd lengths",
    "1.5B, a sequence above the budget",
    "30B EP 8 without recomputation",
    "7B with a KL term",
    "1.5B with a value model",
    "1.5B with a value model, optimizers on the GPU for their steps",
    "1.5B TP 1, feed-forward recomputed",
    "1.5B TP 1, optimizer offloaded",
    "7B PP 2",
    "7B PP 2 x VP 2",
    "7B CP 2",
    "30B EP 4",
    "DeepSeek-V3 TP 1",
    "DeepSeek-V3 TP 4 x PP 2",
    "1.5B TP 1 without recomputation",
    "1.5B, LoRA on queries and values",
    "30B EP 8, LoRA",
    "30B EP 8, LoRA on experts",
    "30B EP 8 PP 2",
    "qwen2.5-7b-grpo-megatron (128 GPUs), few layers",
    "1.5B TP 1",
    "1.5B without recomputation",
}


def mark_long(case):
    return pytest.param(case, marks=[pytest.mark.long] * (case.name in LONG), id=case.name)


def test_long_cases_exist():
    assert {case.name for case in CASES} >= LONG


@pytest.mark.parametrize("case", map(mark_long, CASES))
def test_the_plan_is_within_a_tenth_of_the_count(case, count_ranks):
    """Each phase of a rank of each stage; a failure shows both sides term by term."""
    counts = count_ranks(case.jobs())
    found = [row for count in counts for row in rows(count)]
    assert {row.phase for row in found} >= set(case.phases)
    wrong = [row.describe() for row in found if abs(row.error) > MOST_ERROR]
    assert not wrong, "\n\n".join(wrong)


def test_every_layer_of_an_moe_adds_the_same(count_ranks):
    """Presets of an MoE are counted with a few of their layers, which holds only if all are alike.

    The plan is linear too, so that both agree for any number of layers if they agree for these.
    """
    (case,) = (case for case in layout_cases() if case.name == "30B EP 4")
    # All layers recomputed: a share of the preset's would be no whole number of a few layers.
    case = dataclasses.replace(case, overrides=(*case.overrides, "actor.recompute_num_layers=null"))
    jobs = [job for n in (2, 3, 4) for job in dataclasses.replace(case, layers=n).jobs()]
    counts = count_ranks(jobs)
    found = [{row.phase: row for row in rows(count)} for count in counts]
    assert set(found[0]) == set(PHASES)
    for phase in PHASES:
        sizes = [one[phase].counted_bytes for one in found]
        planned = [one[phase].plan.num_bytes for one in found]
        layer = sizes[1] - sizes[0]
        assert sizes[2] - sizes[1] == pytest.approx(layer, rel=0.001), phase
        assert planned[2] - planned[1] == pytest.approx(planned[1] - planned[0], rel=0.001), phase
        assert planned[1] - planned[0] == pytest.approx(layer, rel=MOST_ERROR), phase


def test_routes_take_no_memory_of_the_gpu(count_ranks):
    """They are in host memory, whose bytes tests/distributed/test_routing_replay.py counts."""
    (case,) = (case for case in layout_cases() if case.name == "30B EP 4")
    (plain,) = dataclasses.replace(case, layers=2, phases=("update",)).jobs()
    replay = dataclasses.replace(plain, routing_replay="old_log_probs")
    without, held = (count.phases["update"] for count in count_ranks([plain, replay]))
    assert held.gpu_bytes == pytest.approx(without.gpu_bytes, rel=0.01)


def test_the_copy_with_the_largest_piece_is_counted():
    """Ten elements in two shares of a bucket: 3 + 7 gives the second five, 7 + 3 the first."""

    def buffer(*sizes):
        ends = list(itertools.accumulate(sizes))
        places = {
            n: (end - size, end, 0) for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
        }
        bucket = SimpleNamespace(offset=0, grad_data=torch.empty(10, device="meta"))
        return SimpleNamespace(
            data_parallel_group="the copies", param_index_map=places, buckets=[bucket]
        )

    with mock.patch("torch.distributed.get_process_group_ranks", lambda group: [4, 6]):
        assert rank_of_largest_piece([buffer(3, 7)], 4) == 6
        assert rank_of_largest_piece([buffer(7, 3)], 6) == 4
        assert rank_of_largest_piece([buffer(10)], 6) == 6, "no other is larger: the rank itself"
    assert rank_of_largest_piece([], 6) == 6


def test_every_gpu_preset_is_counted_whole():
    """All phases of every model, and the layouts from 8 to 1,024 GPUs."""
    whole = {case.overrides[0] for case in preset_cases() if case.phases == PHASES}
    assert whole >= {f"model={name}" for name in gpu_models()}
    assert {f"experiment={name}" for name in ("qwen2.5-1.5b-grpo-megatron",)} <= whole
    assert [name for name in gpu_models() if "a3b" in name], "an MoE is among them"
    sizes = {job.layout.world_size for case in CASES for job in case.jobs()}
    assert sizes >= {8, 16, 128, 1024}
    layouts = [job for case in CASES for job in case.jobs()]
    assert {job.layout.pipeline_parallel for job in layouts} >= {1, 2, 4}
    assert {job.layout.context_parallel for job in layouts} >= {1, 2, 4}
    assert {job.layout.expert_parallel for job in layouts} >= {1, 4, 8}


def test_micro_batches_in_flight_are_those_of_1f1b(count_ranks):
    """A stage holds as many as there are stages from it to the last, and no more than there are."""
    (case,) = (case for case in layout_cases() if case.name == "7B PP 4")
    jobs = case.jobs()
    found = {count.job.stage: count.in_flight for count in count_ranks(jobs)}
    assert found == {0: 4, 1: 3, 3: 1}
    few = [dataclasses.replace(job, microbatches=2, phases=("update",)) for job in jobs]
    assert {c.job.stage: c.in_flight for c in count_ranks(few)} == {0: 2, 1: 2, 3: 1}


def test_a_micro_batch_leaves_nothing_behind(count_ranks):
    """Three micro-batches peak as high as one, without pipeline stages."""
    (case,) = (case for case in layout_cases() if case.name == "1.5B TP 1")
    (job,) = case.jobs()
    several = dataclasses.replace(job, microbatches=3, phases=("update", "log-probs"))
    one, three = count_ranks([job, several])
    assert three.phases["update"].gpu_bytes == pytest.approx(one.phases["update"].gpu_bytes, 0.01)


def test_an_moe_keeps_nothing_of_an_update(count_ranks):
    """Megatron's dispatchers would keep each recomputed layer's input and its gradient."""
    (case,) = (case for case in preset_cases() if case.name == "qwen3_30b_a3b (16 GPUs)")
    (count,) = count_ranks(case.jobs())
    found = {row.phase: row for row in rows(count)}
    assert abs(found["state"].error) < 0.01, found["state"].describe()
    assert abs(found["checkpoint"].error) < 0.01, found["checkpoint"].describe()


def test_tied_embeddings_are_held_once_on_one_stage(count_ranks):
    """And twice where first and last stage differ; a rank's parameters are those of the plan."""
    cases = {case.name: case for case in CASES}
    untied, tied = (
        count_ranks(cases[name].jobs())[0]
        for name in (
            "r1_distill_qwen_1.5b (8 GPUs), few layers",
            "qwen2.5_1.5b (8 GPUs), few layers",
        )
    )
    table = 151936 // 2 * 1536
    assert untied.parameters - tied.parameters == table
    first, last = count_ranks(cases["1.5B tied PP 2"].jobs())
    # Last: the copy of the table, and the final norm.
    assert last.parameters - first.parameters == 1536
