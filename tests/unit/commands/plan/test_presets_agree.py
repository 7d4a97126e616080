"""The GPU presets of ``conf/`` use the memory that ``rlmath plan layout`` finds: recomputing
without need costs time, and a small share of the GPU costs engines their KV cache."""

import re

import pytest

from benchmarks.dry_run.presets import EXPERIMENTS, preset_cases
from rlmath.cli import main
from rlmath.config.load import load

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
