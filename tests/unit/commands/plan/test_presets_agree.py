"""The GPU presets of ``conf/`` use the memory that ``rlmath plan layout`` finds: recomputing
without need costs time, and a small share of the GPU costs engines their KV cache."""

import re

import pytest

from benchmarks.dry_run.presets import EXPERIMENTS, preset_cases
from rlmath.cli import main
from rlmath.commands.plan.colocated import settings_cache_tokens, settings_in_plan, settings_phases
from rlmath.commands.plan.memory import host_bytes, usable_bytes
from rlmath.config.load import load
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

# Too slow to run after each change.
pytestmark = pytest.mark.process

# Fields of a preset for the plan; how many GPUs have a copy of the model is the preset's choice.
GIVEN = (
    "model.path",
    "cluster.nodes",
    "cluster.gpus_per_node",
    "data.max_prompt_tokens",
    "rollout.max_response_tokens",
    "rollout.max_running_sequences",
    "rollout.tensor_parallel",
    "algorithm.prompts_per_step",
    "algorithm.group_size",
    "algorithm.minibatches_per_step",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.expert_parallel",
    "actor.max_tokens_per_microbatch",
)
# Below the plan's share, for what a GPU has that the plan does not know.
MOST_SPARE = 0.06
LONG = ("actor=long_context", "rollout=long_context")


def value(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


def plan_of(overrides, capsys):
    """The settings, and those that the plan makes for the same layout."""
    config = load([*overrides, "runner.run_dir=runs/plan", "data.train_paths=[x]"])
    given = [f"{key}={value(config, key)}" for key in GIVEN]
    assert main(["plan", "layout", *given]) == 0
    return config, dict(re.findall(r"^  ([a-z_.]+)=(.*)$", capsys.readouterr().out, re.M))


@pytest.mark.parametrize("case", preset_cases(), ids=lambda case: case.name)
def test_a_preset_recomputes_what_the_plan_says_and_reserves_no_more(case, capsys):
    config, planned = plan_of(case.overrides, capsys)
    layers = config.actor.recompute_num_layers
    assert planned["actor.recompute"] == config.actor.recompute.value
    # The MoE's preset is for the fewest GPUs that hold it.
    if "(128 GPUs)" not in case.name or layers is None:
        assert planned["actor.recompute_num_layers"] == ("null" if layers is None else str(layers))
    share = float(planned["rollout.gpu_memory_utilization"])
    assert config.rollout.gpu_memory_utilization <= share


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"experiment={name}"] for name in EXPERIMENTS),
        # The use of ``rollout=long_context``: the largest dense models on one node.
        ["model=qwen3_8b", *LONG, "cluster=gpu8"],
        ["model=r1_distill_qwen_7b", *LONG, "cluster=gpu8"],
        ["model=r1_distill_qwen_1.5b", LONG[0], "rollout=long_context_1.5b", "cluster=gpu8"],
        ["model=qwen3_30b_a3b", *LONG, "cluster=gpu16x8", "cluster.nodes=2"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_preset_reserves_for_engines_what_the_plan_says(overrides, capsys):
    config, planned = plan_of(overrides, capsys)
    share = float(planned["rollout.gpu_memory_utilization"])
    assert share - MOST_SPARE <= config.rollout.gpu_memory_utilization <= share


GPU_GIB = 80.0
# Host memory of a node of eight such cards; most have more.
NODE_BYTES = 1e12


@pytest.mark.parametrize("case", preset_cases(), ids=lambda case: case.name)
def test_a_preset_fits_80_gib(case):
    """Every phase beside an engine, a KV cache of at least eight longest sequences, and the host
    memory of a checkpoint that is written in the background."""
    config = load([*case.overrides, "runner.run_dir=runs/plan", "data.train_paths=[x]"])
    spec = model_spec(KNOWN[config.model.path.rsplit("/", 1)[-1]])
    phases = settings_phases(config, spec, GPU_GIB)
    assert {"logits", "training", "weight sync", "wake-up", "checkpoint"} <= {
        p.name for p in phases
    }
    too_full = [p.describe() for p in phases if p.num_bytes > usable_bytes(GPU_GIB)]
    assert not too_full, "\n".join(too_full)
    actor, step = settings_in_plan(config, spec)
    assert settings_cache_tokens(config, spec, GPU_GIB) >= 8 * step.longest_tokens
    assert host_bytes(spec, actor, step, config.cluster.gpus_per_node) < NODE_BYTES / 2


def test_the_moe_needs_what_its_preset_says():
    """With the 20 recomputed layers and the engine's share of the dense presets it does not fit."""
    (case, *_) = (case for case in preset_cases() if case.name.startswith("qwen3_30b_a3b (16"))
    dense = ("actor.recompute_num_layers=20", "rollout.gpu_memory_utilization=0.6")
    config = load([*case.overrides, *dense, "runner.run_dir=runs/plan", "data.train_paths=[x]"])
    spec = model_spec(KNOWN["Qwen3-30B-A3B"])
    full = {
        phase.name
        for phase in settings_phases(config, spec, GPU_GIB)
        if phase.num_bytes > usable_bytes(GPU_GIB)
    }
    assert full >= {"logits", "training", "wake-up"}
