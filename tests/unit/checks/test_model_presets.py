"""Each preset of a model names its family and a layout that the plan of weights accepts.

The sizes are those of the models' published config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_cases import GPU_MACHINE, QWEN_1_5B, QWEN_7B

from rlmath.checks.run import check
from rlmath.config.groups import options
from rlmath.config.load import load
from rlmath.model.families import family_of
from rlmath.model.folder import TINY
from rlmath.model.parallel import Layout
from rlmath.model.spec import model_spec, read_model_spec
from rlmath.weights.plan import plan_weights

_BASE = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
# Of each preset: family, config.json, billions of parameters.
PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {
    "r1_distill_qwen_1.5b": ("qwen2", _BASE | QWEN_1_5B, 1.78),
    "r1_distill_qwen_7b": ("qwen2", _BASE | QWEN_7B, 7.62),
    "qwen2.5_1.5b": ("qwen2", _BASE | QWEN_1_5B | {"tie_word_embeddings": True}, 1.54),
    "qwen2.5_7b": ("qwen2", _BASE | QWEN_7B, 7.62),
    "qwen3_8b": (
        "qwen3",
        _BASE
        | _8B
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 128,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "vocab_size": 151936,
        },
        8.19,
    ),
    "llama3.1_8b": (
        "llama3",
        _8B
        | {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "vocab_size": 128256,
        },
        8.03,
    ),
    "qwen3_30b_a3b": (
        "qwen3_moe",
        _BASE
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
        },
        30.53,
    ),
}


@pytest.mark.parametrize("name", [name for name in options("model") if name != TINY])
def test_a_preset_has_a_family_and_a_layout_that_the_plan_accepts(
    name: str, tmp_path: Path, make_model: Callable[..., Path], make_data: Callable[..., Path]
) -> None:
    family, sizes, billions = PUBLISHED[name]
    folder = make_model(sizes)
    settings = [
        f"model={name}",
        "actor=long_context",
        "cluster=gpu8",
        "cluster.nodes=2",
        "cluster.ray_address=auto",
        f"data.train_paths=[{make_data()}]",
        f"runner.run_dir={tmp_path / 'run'}",
        "rollout.max_response_tokens=8192",
    ]
    preset = load(settings)
    assert family_of(str(preset.model.architecture)).name == family
    assert read_model_spec(folder).num_parameters / 1e9 == pytest.approx(billions, abs=0.006)
    # No network: the folder stands in for the one that the preset names.
    config = load([*settings, f"model.path={folder}"])
    check(config, "train", replace(GPU_MACHINE, disk_bytes=10**14))

    actor, spec = preset.actor, model_spec(sizes)
    layout = Layout(
        actor.tensor_parallel, actor.pipeline_parallel, expert_parallel=actor.expert_parallel
    )
    engine = Layout(preset.rollout.tensor_parallel)
    plan = plan_weights(spec, layout, engine, 512, torch.bfloat16)
    sent = sum(op.num_bytes for bucket in plan.buckets for op in bucket.gathers)
    assert sent / 2e9 == pytest.approx(billions, abs=0.006)
