"""Small model shapes of every family, shared by the tests of weights."""

from dataclasses import replace

import torch

from rlmath.model.rope import Rope
from rlmath.model.spec import LinearAttention, ModelSpec
from rlmath.weights.pieces import hf_shapes

QWEN2 = ModelSpec(
    architecture="Qwen2ForCausalLM",
    layers=3,
    hidden=32,
    heads=8,
    kv_heads=2,
    head_dim=4,
    ffn=24,
    vocab=53,
    tied=False,
    norm_eps=1e-6,
    rope=Rope(10000.0, "default", {}),
    max_positions=128,
)
QWEN3 = replace(QWEN2, architecture="Qwen3ForCausalLM", head_dim=6, tied=True)
LLAMA = replace(QWEN2, architecture="LlamaForCausalLM")
QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    tied=False,
    experts=4,
    experts_per_token=2,
    moe_ffn=12,
    dense_layers=(1,),
)
MISTRAL = replace(QWEN2, architecture="MistralForCausalLM", sliding_window=64)
OLMO2 = replace(QWEN2, architecture="Olmo2ForCausalLM", kv_heads=4)
QWEN3_5 = replace(
    QWEN2,
    architecture="Qwen3_5ForCausalLM",
    linear=LinearAttention(4, 8, key_head_dim=3, value_head_dim=5, conv_width=4),
    linear_layers=(0, 2),
)
QWEN3_NEXT = replace(
    QWEN3_MOE,
    architecture="Qwen3NextForCausalLM",
    linear=QWEN3_5.linear,
    linear_layers=(0, 1),
    shared_ffn=20,
)
ALL = {
    s.architecture: s for s in (QWEN2, QWEN3, LLAMA, QWEN3_MOE, MISTRAL, OLMO2, QWEN3_5, QWEN3_NEXT)
}


def random_weights(spec):
    """A random tensor for each name of the model's Hugging Face files."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(size, generator=generator) for name, size in hf_shapes(spec).items()}
