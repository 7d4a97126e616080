"""The GPU presets fit the cards that they are made for, by the plan."""

import pytest

from benchmarks.dry_run.presets import preset_cases
from rlmath.commands.plan.colocated import settings_cache_tokens, settings_in_plan, settings_phases
from rlmath.commands.plan.memory import host_bytes, usable_bytes
from rlmath.config.load import load
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

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
