"""Memory of a plan: against counts by hand, published counts, and what the weight tables say."""

import dataclasses
import math

import pytest
import torch

from rlmath.actor.head_rows import rows_per_table, weight_rows_per_block
from rlmath.actor.logprobs import ROWS_PER_CHUNK
from rlmath.commands.plan import activations
from rlmath.commands.plan.activations import logits_bytes
from rlmath.commands.plan.colocated import (
    beside_sleeping_engine,
    engine_fixed_terms,
    settings_cache_tokens,
    with_awake_engine,
)
from rlmath.commands.plan.engine_adapters import asleep_bytes, inbox_bytes, slot_bytes
from rlmath.commands.plan.engine_memory import engine_weights_bytes, kv_bytes
from rlmath.commands.plan.memory import (
    GIB,
    MIB,
    ActorShape,
    Step,
    actor_phases,
    host_bytes,
    merging_bytes,
    micro_batches_in_flight,
    model_state_bytes,
    moved_bytes,
    route_bytes,
    stage_phases,
    trainer_sync_bytes,
    value_state_bytes,
)
from rlmath.commands.plan.models import (
    adapter_sizes_of_rank,
    attention_matrices,
    expert_parameters_of_rank,
    feed_forward_matrices,
    layer_norms,
    parameters_of_rank,
)
from rlmath.config.load import load
from rlmath.config.rollout import KvCacheDtype
from rlmath.engines.transport import SyncSizes, transport_named
from rlmath.model.lora import Lora, adapted_entries, adapter_parameters
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from rlmath.weights.adapters import adapter_layout
from rlmath.weights.buckets import TensorMeta, cut_into_buckets
from rlmath.weights.parameters import LocalParameter
from rlmath.weights.pieces import hf_shapes, local_tensor
from rlmath.weights.plan import SourceRank, plan_weights


def worst_state_bytes(spec, actor):
    """State of the fullest stage."""
    stages = range(actor.layout.pipeline_parallel)
    return max(model_state_bytes(spec, actor, stage).whole for stage in stages)


# As the models' pages on the hub give them (numbers of parameters of their safetensors).
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Mistral-7B-v0.3": 7_248_023_552,
    "OLMo-2-1124-7B": 7_298_617_344,
    "OLMo-2-1124-13B": 13_716_198_400,
    "phi-4": 14_659_507_200,
}


def spec(name="DeepSeek-R1-Distill-Qwen-7B"):
    return model_spec(KNOWN[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name):
    assert spec(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_of_the_weight_tables(name):
    tensors = hf_shapes(spec(name)).values()
    assert spec(name).num_parameters == sum(torch.Size(size).numel() for size in tensors)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "ep"),
    [
        *(("DeepSeek-R1-Distill-Qwen-7B", tp, pp, 1) for tp, pp in ((1, 1), (1, 2), (2, 1))),
        *(("DeepSeek-R1-Distill-Qwen-7B", tp, pp, 1) for tp, pp in ((4, 1), (2, 4))),
        *(("Qwen3-30B-A3B", *one) for one in ((1, 1, 1), (1, 1, 8), (2, 1, 4), (1, 2, 2))),
    ],
)
def test_a_rank_holds_what_the_weight_plan_takes_from_it(name, tp, pp, ep):
    """Rank 0 of each stage: it gives its share of every matrix, what is the same on all, and its
    experts."""
    one = spec(name)
    layout = Layout(tp, pp, expert_parallel=ep)
    plan = plan_weights(one, layout, Layout(), 512.0, torch.bfloat16)
    for stage in range(pp):
        rank = SourceRank(pp=stage, tp=0, ep=0)
        given = sum(
            op.num_bytes for bucket in plan.buckets for op in bucket.gathers if op.rank == rank
        )
        held = parameters_of_rank(one, layout, stage)
        assert given == 2 * (held + expert_parameters_of_rank(one, layout, stage))


def test_triton_takes_no_tables():
    """The same chunk of logits, beside a block of the weight's gradient where the tables were."""
    actor = ActorShape(Layout(4, 1, 2), recompute_layers=0, max_tokens=28672)
    rows, width = 5248, 38016
    for backward, tables in ((False, 2), (True, 3)):
        with_tables = logits_bytes(spec(), actor, backward=backward)
        without = logits_bytes(spec(), actor, backward=backward, kernels=True)
        table = 4 * width * rows_per_table(width)
        rest = max(64 * rows, 2 * weight_rows_per_block(3584) * 3584 if backward else 0)
        assert with_tables - without == tables * table - rest > 0
    step = Step(8, 8192, triton_logits=True)
    phases = {one.name: one for one in stage_phases(spec(), actor, step, 0)}
    plain = {one.name: one for one in stage_phases(spec(), actor, Step(8, 8192), 0)}
    assert phases["logits"].num_bytes < plain["logits"].num_bytes


def test_the_chunk_is_that_of_the_actor():
    assert activations.SOFTMAX_ROWS == ROWS_PER_CHUNK


def test_keys_and_values_of_a_token():
    """Two of 28 layers x 4 heads x 128 x 2 bytes; 8 ranks hold copies of 4 heads."""
    assert kv_bytes(spec(), 1) == 2 * 28 * 4 * 128 * 2
    assert kv_bytes(spec(), 2) == 2 * 28 * 2 * 128 * 2
    assert kv_bytes(spec(), 8) == kv_bytes(spec(), 4)


def test_the_longest_of_uneven_stages_is_the_fullest():
    """Beside in-flight micro-batches, which grow fewer from stage to stage."""
    one, layout = spec(), Layout(1, 5)
    assert layout.stage_sizes(28) == (5, 6, 6, 6, 5)
    given = Layout(1, 5, pipeline_layers=(2, 2, 20, 2, 2))
    even, uneven = (ActorShape(each, 0, 8192) for each in (layout, given))
    layer = attention_matrices(one) + feed_forward_matrices(one) + layer_norms(one)
    assert worst_state_bytes(one, uneven) == 18 * 20 * layer
    held = {
        actor: {phase.name: phase for phase in actor_phases(one, actor, Step(8, 8192))}
        for actor in (even, uneven)
    }
    kept = {actor: phases["training"].terms["activations"] for actor, phases in held.items()}
    # Three micro-batches in flight on the third stage of five; five on the first of 5 layers.
    assert kept[uneven] / kept[even] == pytest.approx(3 * 20 / (5 * 5))


def test_a_reference_model_is_on_the_host():
    """It changes places with the model's weights, so the GPU holds one of them at a time."""
    one, actor = spec(), ActorShape(Layout(4, 1, 2), recompute_layers=28, max_tokens=8192)
    without, held = Step(8, 8192), Step(8, 8192, reference=True)
    phases = {phase.name: phase for phase in stage_phases(one, actor, held, 0)}
    weights = 2 * parameters_of_rank(one, actor.layout, 0)
    assert phases["reference"].num_bytes == phases["log-probs"].num_bytes
    assert host_bytes(one, actor, held, 8) - host_bytes(one, actor, without, 8) == 8 * weights


def test_interleaved_stages_keep_more():
    """The first of p stages with v chunks: 1 + (p - 1) / (p v) times as much (Korthikanti et al.
    2022, section 4.2.3), of the last one a round of micro-batches but for a chunk's share."""
    for p, v in ((2, 2), (4, 2), (8, 4)):
        plain, layout = Layout(1, p), Layout(1, p, virtual_stages=v)
        assert micro_batches_in_flight(plain, 64, 0) == p
        ratio = micro_batches_in_flight(layout, 64, 0) / p
        assert ratio == pytest.approx(1 + (p - 1) / (p * v))
        assert micro_batches_in_flight(layout, 64, p - 1) == ((v - 1) * p + 1) / v
        assert micro_batches_in_flight(layout, 1, 0) == 1


def test_routes_are_on_the_host():
    """48 MoE layers and 8 experts a token: 384 bytes, which stages and tensor ranks share."""
    moe, held = model_spec(KNOWN["Qwen3-30B-A3B"]), Step(8, 8192, replayed_tokens=100_000)
    for layout, share in ((Layout(1, 1, 8), 1), (Layout(2, 2, 8), 4)):
        actor = ActorShape(layout, recompute_layers=24, max_tokens=8192)
        without = host_bytes(moe, actor, Step(8, 8192), 8)
        assert host_bytes(moe, actor, held, 8) - without == 8 * 100_000 * 384 / share
    many = dataclasses.replace(moe, experts=512)
    actor = ActorShape(Layout(1, 1, 8), recompute_layers=24, max_tokens=8192)
    assert route_bytes(many, actor, held, 0) == 2 * route_bytes(moe, actor, held, 0)


def test_a_value_model_is_the_model_without_its_output_layer():
    one, actor = spec(), ActorShape(Layout(4, 2, 2), recompute_layers=14, max_tokens=8192)
    table = 152064 // 4 * 3584
    policy = parameters_of_rank(one, actor.layout, 1)
    assert value_state_bytes(one, actor, 1).whole == (policy - table) * 12
    named = {p.name: p for p in stage_phases(one, actor, Step(8, 8192, value_model=True), 1)}
    assert named["logits"].terms["value model"] == (policy - table) * 12
    assert "value training" in named


@pytest.mark.parametrize("name", ["DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-7B"])
def test_buffers_of_a_weight_sync_follow_the_buckets_and_stay_in_their_bound(name):
    """One bucket, the next with its messages, the last tensor taken, and vLLM's buffer."""
    one, bucket = spec(name), 512 * MIB
    metas = [TensorMeta(n, size, torch.bfloat16) for n, size in hf_shapes(one).items()]
    sizes = [sum(t.meta.num_bytes for t in b.tensors) for b in cut_into_buckets(metas, 512)]
    largest = max(meta.num_bytes for meta in metas)
    last = [0, *(b.tensors[-1].meta.num_bytes for b in cut_into_buckets(metas, 512))]
    following = [*sizes[1:], 0]
    expected = max(a + 2 * b + c for a, b, c in zip(sizes, following, last[:-1], strict=True))
    actor = ActorShape(Layout(4, 1, 2), recompute_layers=28, max_tokens=8192)
    planned = trainer_sync_bytes(one, actor, bucket)
    assert planned == pytest.approx(expected + max(largest, bucket), rel=0.06)
    bound = transport_named("ipc").plan_bytes(SyncSizes(bucket, largest)).trainer_bytes
    assert planned <= bound
    alone = ActorShape(Layout(1, 1, 8), recompute_layers=28, max_tokens=8192)
    assert trainer_sync_bytes(one, alone, bucket) < planned


@pytest.mark.parametrize(
    ("offload", "resident", "log_probs", "value_training"),
    [("none", 2 * 18, 2 * 18, 2 * 18), ("optimizer", 2 + 2, 2 + 2, 2 + 18), ("all", 0, 2, 2 + 18)],
)
def test_a_phase_holds_what_it_has_loaded(offload, resident, log_probs, value_training):
    """Bytes a weight of the policy and of a value model of the same size, on one GPU."""
    one = dataclasses.replace(spec(), tied=True)
    actor, step = ActorShape(Layout(1), 0, 8192), Step(8, 8192, value_model=True, offload=offload)
    named = {phase.name: phase.terms for phase in stage_phases(one, actor, step, 0)}

    def bytes_per_parameter(name):
        terms = named[name]
        state = terms.get("state", 0.0) + terms.get("value model", 0.0)
        return state / parameters_of_rank(one, actor.layout, 0)

    assert bytes_per_parameter("state") == resident
    assert bytes_per_parameter("log-probs") == log_probs
    assert bytes_per_parameter("value training") == value_training
    # The policy's update has its own state, and of the value model what stays.
    assert (
        bytes_per_parameter("training")
        == bytes_per_parameter("optimizer step")
        == 18 + resident / 2
    )
    moved = {"none": 0, "optimizer": 12, "all": 14}[offload]
    assert moved_bytes(one, actor, step) == 2 * moved * parameters_of_rank(one, actor.layout, 0)


def test_engines_wake_beside_copies_where_the_update_took_more():
    """Weights, main parameters and moments are there, gradients and activations are not."""
    one, step = spec(), Step(8, 8192, offload="all")

    def phases(actor, engine_tp):
        beside = beside_sleeping_engine(one, actor, step)
        found = with_awake_engine(one, beside, step, engine_tp, 60 * GIB)
        assert "copies to the host" not in {phase.name for phase in found}
        return {phase.name: phase for phase in found}

    actor = ActorShape(Layout(4, 1, 2), recompute_layers=28, max_tokens=8192)
    named = phases(actor, engine_tp=4)
    wake, parameters = named["early wake-up"], parameters_of_rank(one, actor.layout, 0)
    assert wake.terms["state"] == (2 + 12 / 2) * parameters
    assert wake.terms["engine weights"] == engine_weights_bytes(one, 4)
    fullest = max(named["training"].num_bytes, named["optimizer step"].num_bytes)
    assert wake.num_bytes <= fullest
    # One GPU's engine takes as much as four ranks of the actor freed: they wait.
    assert "early wake-up" not in phases(actor, engine_tp=1)
    none = dataclasses.replace(step, offload="none")
    beside = beside_sleeping_engine(one, actor, none)
    assert "copies to the host" not in {phase.name for phase in beside}


def test_engines_that_compute_adapters_have_a_slot_and_are_sent_little():
    one, layout = model_spec(KNOWN["Qwen2.5-7B"]), Layout(2, 2, 4)
    lora = Lora(12, 32.0, ("q_proj", "down_proj"), layers=(0,))
    merged = ActorShape(layout, recompute_layers=0, max_tokens=8192, lora=lora)
    unmerged = dataclasses.replace(merged, unmerged=True)
    assert merged.engine_adapters is None and unmerged.engine_adapters == lora
    # vLLM's rank is 16; it has room for k and v beside q, and in every layer.
    hidden, ffn, heads, kv = 3584, 18944, 3584, 512
    column = 3 * hidden + (heads + 2 * kv) // 4
    row = ffn // 4 + hidden
    assert slot_bytes(one, 4, lora) == 2 * 16 * 28 * (column + row)
    assert asleep_bytes(one, 4, lora) == engine_weights_bytes(one, 4) + slot_bytes(one, 4, lora)
    whole = 2 * adapter_parameters(one, lora)
    assert inbox_bytes(one, 512 * 2**20, lora) == 2 * whole
    assert inbox_bytes(one, 1000, lora) == whole + 1000
    bucket = 512 * 2**20
    # One shared buffer of ipc, and little in it.
    assert trainer_sync_bytes(one, unmerged, bucket) < 0.2 * trainer_sync_bytes(one, merged, bucket)
    assert merging_bytes(one, unmerged) == 0 < merging_bytes(one, merged)
    fixed = engine_fixed_terms(one, 4, 64, lora)
    assert fixed["adapters"] == slot_bytes(one, 4, lora)
    assert "adapters" not in engine_fixed_terms(one, 4, 64)


def test_engines_in_fp8_have_one_byte_for_an_element_of_a_layers_matrices():
    one = model_spec(KNOWN["Qwen2.5-7B"])
    layer = 3584 * (3584 + 2 * 512) + 3584 + 2 * 512 + 3584 * 3584 + 3 * 3584 * 18944
    rows = 3584 + 2 * 512 + 3584 + 2 * 18944 + 3584
    saved = 28 * (layer - 4 * rows)
    assert engine_weights_bytes(one, 1) - engine_weights_bytes(one, 1, quantized=True) == saved
    half = engine_weights_bytes(one, 2) - engine_weights_bytes(one, 2, quantized=True)
    assert half == saved / 2
    assert engine_fixed_terms(one, 1, 64, None, True)["weights"] == engine_weights_bytes(
        one, 1, quantized=True
    )


def test_a_cache_in_fp8_holds_twice_the_tokens():
    config = load(["experiment=qwen2.5-7b-grpo-megatron"])
    one = model_spec(KNOWN["Qwen2.5-7B"])
    usual = settings_cache_tokens(config, one, gpu_gib=80.0)
    config.rollout.kv_cache_dtype = KvCacheDtype.fp8
    assert settings_cache_tokens(config, one, gpu_gib=80.0) == 2 * usual > 0
    assert kv_bytes(one, 1, in_fp8=True) == 2 * 28 * 4 * 128


def test_adapters_of_the_plan_are_those_of_the_ranks():
    """Against the arithmetic that ranks are built by, with more ranks than key-value heads."""
    one, lora = model_spec(KNOWN["Qwen2.5-1.5B"]), Lora(8, 8.0, ("q_proj", "v_proj", "down_proj"))
    for tp in (1, 4):
        sizes = []
        for entry, layer in adapted_entries(one, lora):
            matrix = local_tensor(entry, one, 0, tp, one.vocab, layer)
            found = adapter_layout(LocalParameter("", torch.empty(0), matrix, entry, layer), lora)
            sizes += [math.prod(found.a.shape), math.prod(found.b.shape)]
        assert sizes == list(adapter_sizes_of_rank(one, Layout(tp), 0, lora))


def test_adapters_of_experts_are_where_the_experts_are():
    """The rank has its own of 128; over tensor ranks where these share each. Their copies share the
    optimizer's state."""
    one, lora = (
        model_spec(KNOWN["Qwen3-30B-A3B"]),
        Lora(8, 8.0, ("o_proj", "gate_proj", "down_proj")),
    )
    fc1, fc2 = 8 * (2048 + 2 * 768), 8 * (768 + 2048)
    apart = Layout(2, 1, 4, expert_parallel=8)
    sizes = adapter_sizes_of_rank(one, apart, 0, lora, of_experts=True)
    assert len(sizes) == 48 * 16 * 4 and sum(sizes) == 48 * 16 * (fc1 + fc2)
    shared = adapter_sizes_of_rank(one, Layout(2), 0, lora, of_experts=True)
    assert sum(shared) == 48 * 128 * 8 * (2048 + 768 + 384 + 2048)
    actor = ActorShape(apart, recompute_layers=0, max_tokens=8192, lora=lora)
    attention = sum(adapter_sizes_of_rank(one, apart, 0, lora))
    state = model_state_bytes(one, actor, 0)
    assert state.optimizer == 12 * (attention / 4 + sum(sizes))
    assert state.gradients == 4 * (attention + sum(sizes))
