"""config.json of real models, in both forms of the rotary fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmath.model.spec import (
    Rope,
    WeightsError,
    model_shape,
    padded_vocab_size,
    read_model_shape,
)

# The published config.json of DeepSeek-R1-Distill-Qwen-1.5B, fields that matter here.
R1_DISTILL_QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def test_reads_a_published_config() -> None:
    shape = model_shape(R1_DISTILL_QWEN)
    assert (shape.head_dim, shape.kv_heads, shape.qkv_bias, shape.qk_norm) == (128, 2, True, False)
    assert shape.rope == Rope(10000.0, "default", {})
    assert not shape.tied


def test_old_and_new_rope_fields_say_the_same() -> None:
    new = dict(LLAMA_31)
    scaling = new.pop("rope_scaling")
    new["rope_parameters"] = {**scaling, "rope_theta": new.pop("rope_theta")}
    assert model_shape(new) == model_shape(LLAMA_31)
    assert model_shape(new).rope.theta == 500000.0
    assert model_shape(new).rope.kind == "llama3"
    assert model_shape(new).rope.parameters["factor"] == 8.0


def test_dense_layers_of_a_mixture() -> None:
    config = {
        **R1_DISTILL_QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    shape = model_shape(config)
    assert shape.dense_layers == (0, 2, 3, 4)
    assert shape.is_moe_layer(5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"architectures": ["GPT2LMHeadModel"]}, "no weight table.*GPT2LMHeadModel"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 5}, "12 query heads do not divide into 5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_refuses_what_the_tables_do_not_cover(change: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        model_shape({**R1_DISTILL_QWEN, **change})


def test_llama_with_attention_bias_is_refused() -> None:
    with pytest.raises(WeightsError, match="attention_bias"):
        model_shape({**LLAMA_31, "attention_bias": True})


def test_reads_a_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="not JSON"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31))
    assert read_model_shape(tmp_path).layers == 32


def test_padded_vocabulary() -> None:
    assert padded_vocab_size(151936, 4) == 151936
    assert padded_vocab_size(53, 4) == 56
    assert padded_vocab_size(53, 4, multiple=16) == 64
