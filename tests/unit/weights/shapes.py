"""Small model shapes of every family, shared by the tests of weights."""

from dataclasses import replace

import torch

from rlmath.model.rope import Rope
from rlmath.model.spec import ModelSpec
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
ALL = {s.architecture: s for s in (QWEN2, QWEN3, LLAMA, QWEN3_MOE, MISTRAL, OLMO2)}


def random_weights(spec, dtype=torch.float32):
    """A random tensor for each name of the model's Hugging Face files."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(size, generator=generator).to(dtype)
        for name, size in hf_shapes(spec).items()
    }
