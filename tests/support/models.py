"""Tiny models of transformers, written to a folder."""

import torch

VOCAB = 101  # Not divisible by 2: the vocabulary is padded under tensor parallelism.


TINY_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}


def make_model(folder, tied, **sizes):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**TINY_SIZES | sizes, tie_word_embeddings=tied)
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return str(folder)


def make_mixture(folder, **changes):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        # One layer without experts.
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | changes)).save_pretrained(folder)
    return str(folder)


def make_olmo2(folder):
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(0)
    config = Olmo2Config(**TINY_SIZES, eos_token_id=None, pad_token_id=None)
    Olmo2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_glm(folder):
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        **TINY_SIZES,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    return save_with_router_biases(Glm4MoeForCausalLM(config), folder)


def make_latent(folder):
    """A DeepSeek-V3: latent attention, a dense layer, and experts in groups."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        **TINY_SIZES | {"num_key_value_heads": TINY_SIZES["num_attention_heads"]},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=16,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        eos_token_id=None,
        pad_token_id=None,
    )
    return save_with_router_biases(DeepseekV3ForCausalLM(config), folder)


def save_with_router_biases(model, folder):
    """Save a model of transformers; biases of its routers, which are 0 at first, change routes."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return str(folder)
