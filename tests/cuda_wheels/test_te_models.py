"""The models of every GPU preset, with Transformer Engine's layers, as the actor builds them."""

import dataclasses
import json

import pytest

from rlmath.config.arithmetic import resolve_layout
from rlmath.config.groups import options
from rlmath.config.load import load
from rlmath.config.schema import Device
from rlmath.model.published import KNOWN
from tests.cuda_wheels.programs import answer_of

LONG = ("actor=long_context", "rollout=long_context", "cluster=gpu16x8")
PRESETS = {
    "qwen2.5-1.5b-grpo-megatron": ("experiment=qwen2.5-1.5b-grpo-megatron",),
    "qwen2.5-7b-grpo-megatron": ("experiment=qwen2.5-7b-grpo-megatron",),
    **{name: (f"model={name}", *LONG) for name in options("model") if name != "tiny"},
    "7B, two stages": (
        "model=r1_distill_qwen_7b",
        *LONG,
        "actor.pipeline_parallel=2",
        "actor.recompute=full",
        "actor.recompute_num_layers=7",
    ),
    "7B, two context ranks": ("model=r1_distill_qwen_7b", *LONG, "actor.context_parallel=2"),
}


def jobs_of(overrides):
    """The first rank of the first and of the last stage."""
    config = load([*overrides, "runner.run_dir=runs/none", "data.train_paths=[x]"])
    layout = resolve_layout(config, Device.cuda).actor
    actor = config.actor
    name = {key.lower(): key for key in KNOWN}[config.model.path.rsplit("/", 1)[-1].lower()]
    per_stage = layout.world_size // layout.pipeline_parallel
    common = {
        "config": KNOWN[name],
        "layout": dataclasses.asdict(layout),
        "sequence_parallel": actor.sequence_parallel,
        "recompute": actor.recompute.value,
        "recompute_layers": actor.recompute_num_layers,
        "precision": {
            "lm_head_dtype": config.precision.lm_head_dtype.value,
            "router_dtype": config.precision.router_dtype.value,
        },
        "tokens": config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    }
    ranks = {0, per_stage * (layout.pipeline_parallel - 1)}
    return [{**common, "rank": rank} for rank in sorted(ranks)]


@pytest.fixture(scope="module")
def models():
    """Models that each preset's ranks build, beside the job; from one process."""
    jobs = [(name, job) for name, overrides in PRESETS.items() for job in jobs_of(overrides)]
    answers = answer_of("te_program", "models", json.dumps([job for _, job in jobs]))
    found = {name: [] for name in PRESETS}
    for (name, job), answer in zip(jobs, answers, strict=True):
        found[name].append((job, answer))
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_the_actor_builds_transformer_engines_layers(models, name):
    for job, answer in models[name]:
        layers = job["config"]["num_hidden_layers"] // job["layout"]["pipeline_parallel"]
        moe = "num_experts" in job["config"]
        kinds = answer["kinds"]
        assert answer["devices"] == ["meta"]
        assert kinds["megatron.TEDotProductAttention"] == layers
        # The norm is fused into the projection of queries, keys and values, and of a dense MLP.
        fused = kinds["megatron.TELayerNormColumnParallelLinear"]
        assert fused == (layers if moe else 2 * layers)
        assert kinds["megatron.TERowParallelLinear"] == (layers if moe else 2 * layers)
        if moe:
            assert kinds["megatron.TEGroupedMLP"] == layers
        assert answer["apply_rope_fusion"] is True
        assert answer["bias_activation_fusion"] is True
        assert answer["moe_grouped_gemm"] is moe
        # Nothing of Megatron's local layers is left but what is outside of them: on the last stage
        # the output layer, which takes rows a chunk at a time.
        own = {kind for kind in kinds if kind.startswith("rlmath.")}
        last = "megatron.ColumnParallelLinear" in kinds
        assert own == ({"rlmath.HeadLinear"} if last else set())
        assert answer["softmax"] == ("rlmath.actor.softmax_triton" if last else None)


def test_the_ranks_hold_the_whole_model(models):
    """Parameters of one rank of each stage, times the ranks that share them."""
    ((job, rank),) = models["qwen2.5-7b-grpo-megatron"]
    whole = rank["parameters"] * job["layout"]["tensor_parallel"]
    assert whole == pytest.approx(7.6e9, rel=0.02)
    first, last = (answer["parameters"] for _, answer in models["7B, two stages"])
    staged = models["7B, two stages"][0][0]["layout"]
    assert (first + last) * staged["tensor_parallel"] == pytest.approx(whole, rel=0.001)


def test_layers_on_their_own():
    assert answer_of("te_program", "layers") == {
        "Linear": 64 * 64,
        "LayerNormLinear": 64 * 128 + 64,
        "GroupedLinear": 4 * 64 * 64,
        "DotProductAttention": 0,
    }
