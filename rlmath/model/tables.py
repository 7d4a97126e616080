"""Tables of Megatron parameters and Hugging Face tensors, from which families are composed.

``{layer}`` and ``{expert}`` are numbers in the whole model on the Hugging Face side. Dimensions are
names that ``ModelSpec.size`` knows; ``ModelSpec.has`` tells which layers have an entry.
"""

from __future__ import annotations

import dataclasses

from rlmath.model.family import Entry, HfTensor, Rule, When

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def _in_layer(
    megatron: str, *hf: str, rule: Rule = Rule.replicated, when: When = When.always
) -> Entry:
    """A parameter of each layer. ``megatron``: its names, separated by spaces. ``hf``: for each
    tensor, its name and its dimensions, separated by spaces."""
    tensors = (one.split() for one in hf)
    return Entry(
        tuple(_MEGATRON + name for name in megatron.split()),
        tuple(HfTensor(_HF + name, tuple(dims)) for name, *dims in tensors),
        rule,
        when,
    )


def _feed_forward(hf: str, width: str, when: When, first: str, second: str) -> tuple[Entry, Entry]:
    """Gate and up in Megatron's ``first`` matrix, and down in its ``second``."""
    gate_and_up = (f"{hf}.{one}_proj.weight {width} hidden" for one in ("gate", "up"))
    return (
        _in_layer(first, *gate_and_up, rule=Rule.gate_up, when=when),
        _in_layer(second, f"{hf}.down_proj.weight hidden {width}", rule=Rule.row, when=when),
    )


def _qkv(kind: str, query: str, key_value: str, when: When = When.always) -> Entry:
    """Weights or biases of queries, keys and values, with their dimensions."""
    sizes = {"q": query, "k": key_value, "v": key_value}
    parts = (f"self_attn.{one}_proj.{kind} {dims}" for one, dims in sizes.items())
    return _in_layer(f"self_attention.linear_qkv.{kind}", *parts, rule=Rule.qkv, when=when)


def _attention(
    megatron: str, hf: str, rule: Rule = Rule.replicated, when: When = When.always
) -> Entry:
    return _in_layer(f"self_attention.{megatron}.weight", f"self_attn.{hf}", rule=rule, when=when)


EMBEDDING = (
    Entry(
        ("embedding.word_embeddings.weight",),
        (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        Rule.vocabulary,
    ),
)

QKV = (
    _qkv("weight", "query hidden", "key_value hidden"),
    _qkv("bias", "query", "key_value", When.qkv_bias),
)

ATTENTION_OUT = (_attention("linear_proj", "o_proj.weight hidden query", Rule.row),)

INPUT_NORM = _in_layer(
    "input_layernorm.weight self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.weight hidden",
)
MLP_NORM = _in_layer(
    "pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight",
    "post_attention_layernorm.weight hidden",
)
QK_NORM = tuple(
    _attention(f"{one}_layernorm", f"{one}_norm.weight head_dim", when=When.qk_norm) for one in "qk"
)

ATTENTION = (INPUT_NORM, *QKV, *QK_NORM, *ATTENTION_OUT, MLP_NORM)

DENSE_MLP = _feed_forward(
    "mlp", "ffn", When.dense_layer, "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
)

QWEN_MOE_MLP = (
    _in_layer("mlp.router.weight", "mlp.gate.weight experts hidden", when=When.moe_layer),
    *_feed_forward(
        "mlp.experts.{expert}",
        "moe_ffn",
        When.moe_layer,
        *(
            f"mlp.experts.local_experts.{{expert}}.{one}.weight mlp.experts.{one}.weight{{expert}}"
            for one in ("linear_fc1", "linear_fc2")
        ),
    ),
)


def _shared(hf: str) -> tuple[Entry, Entry]:
    """The experts that every token uses."""
    names = (f"mlp.shared_experts.{one}.weight" for one in ("linear_fc1", "linear_fc2"))
    return _feed_forward(hf, "shared_ffn", When.shared_experts, *names)


# Megatron and the files name experts as in Qwen3-MoE.
GLM_MOE_MLP = (
    *QWEN_MOE_MLP,
    _in_layer(
        "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias experts", when=When.moe_layer
    ),
    *_shared("mlp.shared_experts"),
)


# DeepSeek's multi-head latent attention. In each head, in the files and in Megatron, the unrotated
# part precedes the rotated part, which precedes the value. The latent vectors, which every head
# needs, are sharded over tensor ranks by columns and all-gathered.
LATENT_ATTENTION = (
    _in_layer("input_layernorm.weight", "input_layernorm.weight hidden"),
    _attention("linear_q_down_proj", "q_a_proj.weight query_rank hidden", Rule.column),
    _attention("q_layernorm", "q_a_layernorm.weight query_rank"),
    _attention("linear_q_up_proj", "q_b_proj.weight query query_rank", Rule.column),
    _attention(
        "linear_kv_down_proj", "kv_a_proj_with_mqa.weight kv_rank_and_rotary hidden", Rule.column
    ),
    _attention("kv_layernorm", "kv_a_layernorm.weight kv_rank"),
    _attention("linear_kv_up_proj", "kv_b_proj.weight content_and_value kv_rank", Rule.column),
    _attention("linear_proj", "o_proj.weight hidden value", Rule.row),
    MLP_NORM,
)

# Qwen3-Next and Qwen3.5: gated attention in some layers, a gated delta net in the others.
GATED_ATTENTION = (
    _qkv("weight", "query_and_gate hidden", "key_value hidden", When.attention_layer),
    *(
        dataclasses.replace(entry, when=When.attention_layer)
        for entry in (*QK_NORM, *ATTENTION_OUT)
    ),
)


def _delta(megatron: str, *hf: str, rule: Rule) -> Entry:
    """A parameter of the layers with a gated delta net."""
    parts = (f"linear_attn.{one}" for one in hf)
    return _in_layer(f"self_attention.{megatron}", *parts, rule=rule, when=When.linear_layer)


DELTA_REST = (
    _delta("conv1d.weight", "conv1d.weight delta_conv one conv_width", rule=Rule.delta_conv),
    _delta("dt_bias", "dt_bias delta_heads", rule=Rule.column),
    _delta("A_log", "A_log delta_heads", rule=Rule.column),
    _delta("out_norm.weight", "norm.weight delta_head_dim", rule=Rule.replicated),
    _delta("out_proj.weight", "out_proj.weight hidden delta_value", rule=Rule.row),
)

DELTA_NET = (
    _delta(
        "in_proj.weight",
        "in_proj_qkv.weight delta_conv hidden",
        "in_proj_z.weight delta_value hidden",
        "in_proj_b.weight delta_heads hidden",
        "in_proj_a.weight delta_heads hidden",
        rule=Rule.delta_in,
    ),
    *DELTA_REST,
)

DELTA_NET_BY_HEAD = (
    _delta(
        "in_proj.weight",
        "in_proj_qkvz.weight delta_conv_gate hidden",
        "in_proj_ba.weight delta_two_heads hidden",
        rule=Rule.delta_in_by_head,
    ),
    *DELTA_REST,
)

SHARED_EXPERT = (
    *_shared("mlp.shared_expert"),
    _in_layer(
        "mlp.shared_experts.gate_weight",
        "mlp.shared_expert_gate.weight one hidden",
        when=When.shared_experts,
    ),
)


def _output(source: str, when: When) -> Entry:
    return Entry(
        ("output_layer.weight",), (HfTensor(source, ("vocab", "hidden")),), Rule.vocabulary, when
    )


HEAD = (
    Entry(
        ("decoder.final_layernorm.weight",),
        (HfTensor("model.norm.weight", ("hidden",)),),
        Rule.replicated,
    ),
    _output("lm_head.weight", When.untied),
    _output("model.embed_tokens.weight", When.tied),
)

DENSE = EMBEDDING + ATTENTION + DENSE_MLP + HEAD

# OLMo-2: the whole projections of queries and keys are normalized, and each layer's norms follow
# attention and feed-forward; in Megatron they are inside the last matrix.
OLMO2_ATTENTION = (
    *QKV,
    _attention("q_layernorm", "q_norm.weight query", Rule.column),
    _attention("k_layernorm", "k_norm.weight key_value", Rule.column),
    *ATTENTION_OUT,
    _in_layer(
        "self_attention.linear_proj.output_norm.weight", "post_attention_layernorm.weight hidden"
    ),
)

OLMO2_MLP = (
    *DENSE_MLP,
    _in_layer("mlp.linear_fc2.output_norm.weight", "post_feedforward_layernorm.weight hidden"),
)
