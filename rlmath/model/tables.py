"""Tables of Megatron parameters and Hugging Face tensors, from which families are composed.

``{layer}`` and ``{expert}`` are numbers in the whole model on the Hugging Face side. Dimensions are
names that ``ModelSpec.size`` knows; ``ModelSpec.has`` tells which layers have an entry.
"""

from __future__ import annotations

import dataclasses

from rlmath.model.family import Entry, HfTensor, Rule, When

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

EMBEDDING = (
    Entry(
        ("embedding.word_embeddings.weight",),
        (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        Rule.vocabulary,
    ),
)

QKV = (
    Entry(
        (_M + "self_attention.linear_qkv.weight",),
        (
            HfTensor(_H + "self_attn.q_proj.weight", ("query", "hidden")),
            HfTensor(_H + "self_attn.k_proj.weight", ("key_value", "hidden")),
            HfTensor(_H + "self_attn.v_proj.weight", ("key_value", "hidden")),
        ),
        Rule.qkv,
    ),
    Entry(
        (_M + "self_attention.linear_qkv.bias",),
        (
            HfTensor(_H + "self_attn.q_proj.bias", ("query",)),
            HfTensor(_H + "self_attn.k_proj.bias", ("key_value",)),
            HfTensor(_H + "self_attn.v_proj.bias", ("key_value",)),
        ),
        Rule.qkv,
        When.qkv_bias,
    ),
)
ATTENTION_OUT = (
    Entry(
        (_M + "self_attention.linear_proj.weight",),
        (HfTensor(_H + "self_attn.o_proj.weight", ("hidden", "query")),),
        Rule.row,
    ),
)

ATTENTION = (
    Entry(
        (_M + "input_layernorm.weight", _M + "self_attention.linear_qkv.layer_norm_weight"),
        (HfTensor(_H + "input_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
    *QKV,
    Entry(
        (_M + "self_attention.q_layernorm.weight",),
        (HfTensor(_H + "self_attn.q_norm.weight", ("head_dim",)),),
        Rule.replicated,
        When.qk_norm,
    ),
    Entry(
        (_M + "self_attention.k_layernorm.weight",),
        (HfTensor(_H + "self_attn.k_norm.weight", ("head_dim",)),),
        Rule.replicated,
        When.qk_norm,
    ),
    *ATTENTION_OUT,
    Entry(
        (_M + "pre_mlp_layernorm.weight", _M + "mlp.linear_fc1.layer_norm_weight"),
        (HfTensor(_H + "post_attention_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
)

DENSE_MLP = (
    Entry(
        (_M + "mlp.linear_fc1.weight",),
        (
            HfTensor(_H + "mlp.gate_proj.weight", ("ffn", "hidden")),
            HfTensor(_H + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        Rule.gate_up,
        When.dense_layer,
    ),
    Entry(
        (_M + "mlp.linear_fc2.weight",),
        (HfTensor(_H + "mlp.down_proj.weight", ("hidden", "ffn")),),
        Rule.row,
        When.dense_layer,
    ),
)

QWEN_MOE_MLP = (
    Entry(
        (_M + "mlp.router.weight",),
        (HfTensor(_H + "mlp.gate.weight", ("experts", "hidden")),),
        Rule.replicated,
        When.moe_layer,
    ),
    Entry(
        (
            _M + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
            _M + "mlp.experts.linear_fc1.weight{expert}",
        ),
        (
            HfTensor(_H + "mlp.experts.{expert}.gate_proj.weight", ("moe_ffn", "hidden")),
            HfTensor(_H + "mlp.experts.{expert}.up_proj.weight", ("moe_ffn", "hidden")),
        ),
        Rule.gate_up,
        When.moe_layer,
    ),
    Entry(
        (
            _M + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
            _M + "mlp.experts.linear_fc2.weight{expert}",
        ),
        (HfTensor(_H + "mlp.experts.{expert}.down_proj.weight", ("hidden", "moe_ffn")),),
        Rule.row,
        When.moe_layer,
    ),
)

# Megatron and the files name experts as in Qwen3-MoE.
GLM_MOE_MLP = (
    *QWEN_MOE_MLP,
    Entry(
        (_M + "mlp.router.expert_bias",),
        (HfTensor(_H + "mlp.gate.e_score_correction_bias", ("experts",)),),
        Rule.replicated,
        When.moe_layer,
    ),
    Entry(
        (_M + "mlp.shared_experts.linear_fc1.weight",),
        (
            HfTensor(_H + "mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden")),
            HfTensor(_H + "mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        Rule.gate_up,
        When.shared_experts,
    ),
    Entry(
        (_M + "mlp.shared_experts.linear_fc2.weight",),
        (HfTensor(_H + "mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn")),),
        Rule.row,
        When.shared_experts,
    ),
)

# DeepSeek's multi-head latent attention. In each head, in the files and in Megatron, the unrotated
# part precedes the rotated part, which precedes the value. The latent vectors, which every head
# needs, are sharded over tensor ranks by columns and all-gathered.
LATENT_ATTENTION = (
    Entry(
        (_M + "input_layernorm.weight",),
        (HfTensor(_H + "input_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
    Entry(
        (_M + "self_attention.linear_q_down_proj.weight",),
        (HfTensor(_H + "self_attn.q_a_proj.weight", ("query_rank", "hidden")),),
        Rule.column,
    ),
    Entry(
        (_M + "self_attention.q_layernorm.weight",),
        (HfTensor(_H + "self_attn.q_a_layernorm.weight", ("query_rank",)),),
        Rule.replicated,
    ),
    Entry(
        (_M + "self_attention.linear_q_up_proj.weight",),
        (HfTensor(_H + "self_attn.q_b_proj.weight", ("query", "query_rank")),),
        Rule.column,
    ),
    Entry(
        (_M + "self_attention.linear_kv_down_proj.weight",),
        (HfTensor(_H + "self_attn.kv_a_proj_with_mqa.weight", ("kv_rank_and_rotary", "hidden")),),
        Rule.column,
    ),
    Entry(
        (_M + "self_attention.kv_layernorm.weight",),
        (HfTensor(_H + "self_attn.kv_a_layernorm.weight", ("kv_rank",)),),
        Rule.replicated,
    ),
    Entry(
        (_M + "self_attention.linear_kv_up_proj.weight",),
        (HfTensor(_H + "self_attn.kv_b_proj.weight", ("content_and_value", "kv_rank")),),
        Rule.column,
    ),
    Entry(
        (_M + "self_attention.linear_proj.weight",),
        (HfTensor(_H + "self_attn.o_proj.weight", ("hidden", "value")),),
        Rule.row,
    ),
    Entry(
        (_M + "pre_mlp_layernorm.weight", _M + "mlp.linear_fc1.layer_norm_weight"),
        (HfTensor(_H + "post_attention_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
)

# Qwen3-Next and Qwen3.5: gated attention in some layers, a gated delta net in the others.
_D = _M + "self_attention."
_L = _H + "linear_attn."
INPUT_NORM, MLP_NORM = ATTENTION[0], ATTENTION[-1]
GATED_ATTENTION = (
    Entry(
        (_D + "linear_qkv.weight",),
        (
            HfTensor(_H + "self_attn.q_proj.weight", ("query_and_gate", "hidden")),
            HfTensor(_H + "self_attn.k_proj.weight", ("key_value", "hidden")),
            HfTensor(_H + "self_attn.v_proj.weight", ("key_value", "hidden")),
        ),
        Rule.qkv,
        When.attention_layer,
    ),
    *(
        dataclasses.replace(entry, when=When.attention_layer)
        for entry in ATTENTION
        if entry.when is When.qk_norm or entry in ATTENTION_OUT
    ),
)
DELTA_REST = (
    Entry(
        (_D + "conv1d.weight",),
        (HfTensor(_L + "conv1d.weight", ("delta_conv", "one", "conv_width")),),
        Rule.delta_conv,
        When.linear_layer,
    ),
    Entry(
        (_D + "dt_bias",),
        (HfTensor(_L + "dt_bias", ("delta_heads",)),),
        Rule.column,
        When.linear_layer,
    ),
    Entry(
        (_D + "A_log",),
        (HfTensor(_L + "A_log", ("delta_heads",)),),
        Rule.column,
        When.linear_layer,
    ),
    Entry(
        (_D + "out_norm.weight",),
        (HfTensor(_L + "norm.weight", ("delta_head_dim",)),),
        Rule.replicated,
        When.linear_layer,
    ),
    Entry(
        (_D + "out_proj.weight",),
        (HfTensor(_L + "out_proj.weight", ("hidden", "delta_value")),),
        Rule.row,
        When.linear_layer,
    ),
)
DELTA_NET = (
    Entry(
        (_D + "in_proj.weight",),
        (
            HfTensor(_L + "in_proj_qkv.weight", ("delta_conv", "hidden")),
            HfTensor(_L + "in_proj_z.weight", ("delta_value", "hidden")),
            HfTensor(_L + "in_proj_b.weight", ("delta_heads", "hidden")),
            HfTensor(_L + "in_proj_a.weight", ("delta_heads", "hidden")),
        ),
        Rule.delta_in,
        When.linear_layer,
    ),
    *DELTA_REST,
)
DELTA_NET_BY_HEAD = (
    Entry(
        (_D + "in_proj.weight",),
        (
            HfTensor(_L + "in_proj_qkvz.weight", ("delta_conv_gate", "hidden")),
            HfTensor(_L + "in_proj_ba.weight", ("delta_two_heads", "hidden")),
        ),
        Rule.delta_in_by_head,
        When.linear_layer,
    ),
    *DELTA_REST,
)
SHARED_EXPERT = (
    Entry(
        (_M + "mlp.shared_experts.linear_fc1.weight",),
        (
            HfTensor(_H + "mlp.shared_expert.gate_proj.weight", ("shared_ffn", "hidden")),
            HfTensor(_H + "mlp.shared_expert.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        Rule.gate_up,
        When.shared_experts,
    ),
    Entry(
        (_M + "mlp.shared_experts.linear_fc2.weight",),
        (HfTensor(_H + "mlp.shared_expert.down_proj.weight", ("hidden", "shared_ffn")),),
        Rule.row,
        When.shared_experts,
    ),
    Entry(
        (_M + "mlp.shared_experts.gate_weight",),
        (HfTensor(_H + "mlp.shared_expert_gate.weight", ("one", "hidden")),),
        Rule.replicated,
        When.shared_experts,
    ),
)


HEAD = (
    Entry(
        ("decoder.final_layernorm.weight",),
        (HfTensor("model.norm.weight", ("hidden",)),),
        Rule.replicated,
    ),
    Entry(
        ("output_layer.weight",),
        (HfTensor("lm_head.weight", ("vocab", "hidden")),),
        Rule.vocabulary,
        When.untied,
    ),
    Entry(
        ("output_layer.weight",),
        (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        Rule.vocabulary,
        When.tied,
    ),
)

DENSE = EMBEDDING + ATTENTION + DENSE_MLP + HEAD

# OLMo-2: the whole projections of queries and keys are normalized, and each layer's norms follow
# attention and feed-forward; in Megatron they are inside the last matrix.
OLMO2_ATTENTION = (
    *QKV,
    Entry(
        (_M + "self_attention.q_layernorm.weight",),
        (HfTensor(_H + "self_attn.q_norm.weight", ("query",)),),
        Rule.column,
    ),
    Entry(
        (_M + "self_attention.k_layernorm.weight",),
        (HfTensor(_H + "self_attn.k_norm.weight", ("key_value",)),),
        Rule.column,
    ),
    *ATTENTION_OUT,
    Entry(
        (_M + "self_attention.linear_proj.output_norm.weight",),
        (HfTensor(_H + "post_attention_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
)
OLMO2_MLP = (
    *DENSE_MLP,
    Entry(
        (_M + "mlp.linear_fc2.output_norm.weight",),
        (HfTensor(_H + "post_feedforward_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
)
