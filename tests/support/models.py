"""Tiny models of transformers, written to a folder."""

from pathlib import Path
from typing import Any

import torch

VOCAB = 101  # Not divisible by 2: the vocabulary is padded under tensor parallelism.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    # Some families name tokens beyond the vocabulary unless told otherwise.
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
# Sizes of the models that ranks train.
TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}


def yarn(original, factor, **more):
    """A rotary embedding that reaches ``factor`` times as far as its original positions."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": factor,
        "original_max_position_embeddings": original,
        **more,
    }


def windowed_ropes(full, theta):
    """OLMo-3's: those of layers with a window are not stretched."""
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


# Sizes of the models that engines have beside others.
SMALL = {"intermediate_size": 96, "num_hidden_layers": 3, "initializer_range": 0.1}
LLAMA3_ROPE = yarn(64, 8.0, rope_theta=500000.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3_ROPE["rope_type"] = "llama3"
# Positions beyond the original ones, which tests' sequences pass.
YARN_ROPE = yarn(8, 16.0, beta_fast=4)
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
GLM4 = {
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
LATENT = {
    "num_key_value_heads": None,  # As many as heads.
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 6,
    # Its mscales differ, so that cosines are scaled as well as the softmax.
    "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
DELTA_NET = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
DELTA_MOE = DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 20}
# transformers' name, and what is other than ``SIZES``. 6 is not the width of a head that follows
# from the hidden size.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"rope_theta": 1e6}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "even": ("Qwen3", {"vocab_size": 102}),
    "qwen3": ("Qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
    "yarn": ("Qwen2", {"rope_parameters": YARN_ROPE}),
    "linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"head_dim": 6, "sliding_window": 4}),
    "phi3": (
        "Phi3",
        {
            "rope_parameters": {"rope_theta": 25e4, "partial_rotary_factor": 0.5},
            "sliding_window": 6,
        },
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4}),
    "olmo3": (
        "Olmo3",
        {
            "num_key_value_heads": 4,
            "sliding_window": 4,
            "rope_parameters": windowed_ropes(YARN_ROPE | {"rope_theta": 500000.0}, 500000.0),
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 6, "mlp_only_layers": [1], **EXPERTS}),
    # Qwen3-235B-A22B: stages of several lengths, heads that are wider together than the hidden
    # size, and many experts for each token.
    "qwen3_235b": (
        "Qwen3Moe",
        {
            "head_dim": 6,
            "num_hidden_layers": 7,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            **EXPERTS,
            "num_experts": 16,
            "num_experts_per_tok": 8,
        },
    ),
    "glm4_moe": ("Glm4Moe", {"head_dim": 8, **GLM4}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "qwen3_5": ("Qwen3_5Text", DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeText", DELTA_MOE),
    "qwen3_next": ("Qwen3Next", DELTA_MOE | {"mlp_only_layers": [2]}),
    # The width of what vLLM keeps of a token is the one that its CPU kernel has.
    "deepseek_v3_in_vllm": (
        "DeepseekV3",
        LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 32},
    ),
}


def make_config(family, **changes):
    """transformers' configuration of a small model of a family.

    Args:
        changes: Any fields; ``head_dim`` counts in families that have their own.
    """
    import transformers

    kind, own = FAMILIES[family]
    fields = SIZES | own | changes
    if "head_dim" not in own:
        fields.pop("head_dim", None)
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return getattr(transformers, f"{kind}Config")(**fields)


def build(family, dtype=torch.float32, **changes):
    """A random model, always the same; ``changes`` as in :func:`make_config`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(family, **changes), dtype=dtype)


def perturb(model, scale):
    """Make all of a model's weights differ, norms, biases and what routers choose by among them."""
    if any("linear_attn" in name for name, _ in model.named_parameters()):
        # Gated delta nets amplify rounding: at 0.2, transformers in float32 is 1e-4 off float64.
        scale = min(scale, 0.03)
    chosen_by = [one for name, one in model.named_buffers() if "correction_bias" in name]
    with torch.no_grad():
        for weight in (*model.parameters(), *chosen_by):
            weight.add_(scale * torch.randn_like(weight))


def make_for_engines(family, folder, scale=0.0, max_positions=512, **changes):
    """A folder with the tiny model's tokenizer, of widths that vLLM's attention takes on a CPU."""
    from rlmath.model.tiny_tokenizer import VOCABULARY_SIZE, build_tokenizer

    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    tokens = {"vocab_size": VOCABULARY_SIZE, "eos_token_id": 256, "pad_token_id": 257}
    given = sizes | tokens | {"max_position_embeddings": max_positions} | changes
    model = build(family, **given)
    perturb(model, scale)
    model.save_pretrained(folder)
    build_tokenizer(max_positions).save_pretrained(folder)
    return Path(folder)


def make_model(folder, tied, **sizes):
    given = TINY_SIZES | sizes | {"rope_theta": 10000.0, "tie_word_embeddings": tied}
    model = build("qwen2", **given)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return str(folder)


def make_mixture(folder, **changes):
    sizes = {"intermediate_size": 96, "head_dim": 16, "moe_intermediate_size": 32}
    build("qwen3_moe", **TINY_SIZES | sizes | changes).save_pretrained(folder)
    return str(folder)


def make_olmo2(folder):
    build("olmo2", **TINY_SIZES).save_pretrained(folder)
    return str(folder)


def make_glm(folder):
    sizes = {"head_dim": 16, "moe_intermediate_size": 32, "n_shared_experts": 1}
    return save_with_router_biases(build("glm4_moe", **TINY_SIZES | sizes), folder)


def make_hybrid(folder):
    """A Qwen3-Next: linear and gated attention, experts and a gated shared one."""
    sizes = {"head_dim": 16, "moe_intermediate_size": 32, "num_key_value_heads": 2}
    model = build("qwen3_next", **TINY_SIZES | sizes | {"initializer_range": 0.02})
    perturb(model, 0.03)
    model.save_pretrained(folder)
    return str(folder)


def make_latent(folder):
    """A DeepSeek-V3: latent attention, a dense layer, and experts in groups."""
    sizes = {
        "num_key_value_heads": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "v_head_dim": 10,
        "rope_parameters": yarn(16, 4.0, mscale=1.0, mscale_all_dim=0.7),
    }
    return save_with_router_biases(build("deepseek_v3", **TINY_SIZES | sizes), folder)


def save_with_router_biases(model, folder):
    """Save a model of transformers; biases of its routers, which are 0 at first, change routes."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return str(folder)
