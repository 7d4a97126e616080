"""The GPU experiments of ``conf/`` use the memory that ``rlmath plan layout`` finds: recomputing
without need costs time, and a small share of the GPU costs engines their KV cache."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.dry_run.presets import EXPERIMENTS
from rlmath.cli import main
from rlmath.config.load import load

# What the plan is told of a preset; how many GPUs have a copy of the model is the preset's choice.
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
    "actor.max_tokens_per_microbatch",
)
# Below the plan's share, for what a GPU has that the plan does not know.
MOST_SPARE = 0.06


def value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_recomputes_and_reserves_what_the_plan_says(
    experiment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load([f"experiment={experiment}"])
    given = [f"{key}={value(config, key)}" for key in GIVEN]
    assert main(["plan", "layout", *given]) == 0
    planned = dict(re.findall(r"^  ([a-z_.]+)=(.*)$", capsys.readouterr().out, re.M))
    assert planned["actor.recompute"] == config.actor.recompute.value
    layers = config.actor.recompute_num_layers
    assert planned["actor.recompute_num_layers"] == ("null" if layers is None else str(layers))
    share = float(planned["rollout.gpu_memory_utilization"])
    assert share - MOST_SPARE <= config.rollout.gpu_memory_utilization <= share
