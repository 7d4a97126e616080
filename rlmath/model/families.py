"""One table per model family: mapping between Megatron parameters and Hugging Face tensors.

To add a family, add a ``Family`` to ``FAMILIES``; a plug-in registers a function that returns one
with ``FAMILY_PLUGINS``. ``{layer}`` and ``{expert}`` are numbers in the
whole model on the Hugging Face side. Dimensions are names that ``ModelSpec.size`` knows;
``ModelSpec.has`` tells which layers have an entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlmath.errors import ModelError
from rlmath.plugins import NoTraits, Registry


class Rule(Enum):
    """How tensor-parallel ranks share a parameter."""

    # Every rank has all of it.
    replicated = "replicated"
    # Rows (output features) are split into equal slices.
    column = "column"
    # Columns (input features) are split into equal slices.
    row = "row"
    # Query, key and value in one matrix, interleaved: for each key-value group its query heads, its
    # key head, its value head. The rows are split into equal slices, so with more ranks than groups
    # a slice is part of a group.
    qkv = "qkv"
    # Gate and up in one matrix: each rank has its slice of gate, then its slice of up.
    gate_up = "gate_up"
    # Rows are tokens: padded at the end to a multiple of the ranks, then split into equal slices.
    vocabulary = "vocabulary"


class QkNorm(Enum):
    """Normalization of queries and keys after their projections."""

    none = "none"
    # Each head separately, with shared weights.
    per_head = "per_head"
    # All heads together, with a weight per feature of the projection.
    all_heads = "all_heads"


class When(Enum):
    """Condition for an entry to exist in a model or layer."""

    always = "always"
    qkv_bias = "qkv_bias"
    # Norms of queries and keys per head.
    qk_norm = "qk_norm"
    untied = "untied"
    # Megatron keeps a second copy of a tied embedding where first and last stage differ.
    tied = "tied"
    dense_layer = "dense_layer"
    # Experts that every token uses, in addition to the routed ones.
    shared_experts = "shared_experts"
    moe_layer = "moe_layer"


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor: its name and its named dimensions."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter.

    Attributes:
        megatron: Its names, one per layer implementation (local, Transformer Engine, ...); a model
            has one of them.
        hf: The Hugging Face tensors in it.
        rule: How ranks share it.
        when: Models and layers that have it.
    """

    megatron: tuple[str, ...]
    hf: tuple[HfTensor, ...]
    rule: Rule
    when: When = When.always

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.hf[0].name

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.hf[0].name


@dataclass(frozen=True)
class Fused:
    """A matrix in the files that the tables list as several, stacked by rows.

    Attributes:
        file: Suffix of the file tensor's name.
        parts: Suffixes of the table tensors' names, in row order.
    """

    file: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Models that differ only in their sizes.

    All have RMS norms, rotary positions, grouped-query or latent attention, and a gated SiLU MLP.

    Attributes:
        name: Name in messages and ``rlmath plan weights``.
        architectures: Values of ``architectures`` in config.json.
        entries: The table of tensors, in the order in which they are written and sent.
        ignored_suffixes: Suffixes of tensor names in files that are ignored.
        ignored_prefixes: Prefixes of ignored names: layers for multi-token prediction (MTP), which
            may have the next layer number, ``{layers}``.
        fused: Matrices that are fused in the files. Everything else, including vLLM, uses the
            table's names; only reading and writing of folders uses these.
        qkv_bias: Query, key and value have biases.
        qk_norm: How queries and keys are normalized.
        norms_after: A layer's norms follow attention and feed-forward instead of preceding them.
        sliding_window: In windowed layers a token attends to the last ``sliding_window`` tokens of
            config.json, or to all if that is null.
        full_every: If config.json has no ``layer_types``, every N-th layer has no window; windowed
            layers have a different rotary embedding. 0: all layers are windowed.
        moe: Layers can have experts (MoE).
        sigmoid_router: A token uses the experts with the highest sigmoid plus bias, weighted by the
            sigmoids without bias; otherwise a softmax selects and weighs.
        optional: Features among ``qkv_bias`` and ``qk_norm`` that a model has only if the given
            field of config.json is true.
        latent: Attention is multi-head latent attention.
        expert_groups: Experts may be in groups, and a token uses only the best groups.
        ropes: Kinds of rotary embedding that the actor computes.
        partial_rotary: Default share of a head that is rotated; ``None``: whole heads.
        refused_options: Fields of config.json that, if true, need something that the table lacks or
            the actor does not compute.
        defaults: Optional fields of config.json, with transformers' defaults.
        vllm: vLLM's model class as ``module:Class``, for a plug-in's family; empty: vLLM knows the
            architectures itself.
    """

    name: str
    architectures: tuple[str, ...]
    entries: tuple[Entry, ...]
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)
    ignored_prefixes: tuple[str, ...] = ()
    fused: tuple[Fused, ...] = ()
    qkv_bias: bool = False
    qk_norm: QkNorm = QkNorm.none
    norms_after: bool = False
    sliding_window: bool = False
    full_every: int = 0
    moe: bool = False
    sigmoid_router: bool = False
    latent: bool = False
    expert_groups: bool = False
    optional: Mapping[str, str] = field(default_factory=dict)
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    partial_rotary: float | None = None
    refused_options: tuple[str, ...] = ("attention_bias", "mlp_bias", "use_sliding_window")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    vllm: str = ""


_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

_EMBEDDING = (
    Entry(
        ("embedding.word_embeddings.weight",),
        (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        Rule.vocabulary,
    ),
)

_QKV = (
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
_ATTENTION_OUT = (
    Entry(
        (_M + "self_attention.linear_proj.weight",),
        (HfTensor(_H + "self_attn.o_proj.weight", ("hidden", "query")),),
        Rule.row,
    ),
)

_ATTENTION = (
    Entry(
        (_M + "input_layernorm.weight", _M + "self_attention.linear_qkv.layer_norm_weight"),
        (HfTensor(_H + "input_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
    *_QKV,
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
    *_ATTENTION_OUT,
    Entry(
        (_M + "pre_mlp_layernorm.weight", _M + "mlp.linear_fc1.layer_norm_weight"),
        (HfTensor(_H + "post_attention_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
)

_DENSE_MLP = (
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

_QWEN_MOE_MLP = (
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
_GLM_MOE_MLP = (
    *_QWEN_MOE_MLP,
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
_LATENT_ATTENTION = (
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

_HEAD = (
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

_DENSE = _EMBEDDING + _ATTENTION + _DENSE_MLP + _HEAD

# OLMo-2: the whole projections of queries and keys are normalized, and each layer's norms follow
# attention and feed-forward; in Megatron they are inside the last matrix.
_OLMO2_ATTENTION = (
    *_QKV,
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
    *_ATTENTION_OUT,
    Entry(
        (_M + "self_attention.linear_proj.output_norm.weight",),
        (HfTensor(_H + "post_attention_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
)
_OLMO2_MLP = (
    *_DENSE_MLP,
    Entry(
        (_M + "mlp.linear_fc2.output_norm.weight",),
        (HfTensor(_H + "post_feedforward_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
)

FAMILIES = (
    # Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen. They always have the biases, without an option.
    # MiMo-7B is a Qwen2 with layers for multi-token prediction.
    Family(
        "qwen2",
        ("Qwen2ForCausalLM",),
        _DENSE,
        ignored_prefixes=("model.mtp_layers.",),
        qkv_bias=True,
        refused_options=("use_sliding_window",),
        defaults={"rms_norm_eps": 1e-6},
    ),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        _DENSE,
        qk_norm=QkNorm.per_head,
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
    ),
    # Llama 3, 3.1, 3.2 and DeepSeek-R1-Distill-Llama.
    Family("llama3", ("LlamaForCausalLM",), _DENSE, defaults={"rms_norm_eps": 1e-6}),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        _EMBEDDING + _ATTENTION + _DENSE_MLP + _QWEN_MOE_MLP + _HEAD,
        qk_norm=QkNorm.per_head,
        moe=True,
        defaults={"rms_norm_eps": 1e-6},
    ),
    # GLM-4.5 and GLM-4.5-Air.
    Family(
        "glm4_moe",
        ("Glm4MoeForCausalLM",),
        _EMBEDDING + _ATTENTION + _DENSE_MLP + _GLM_MOE_MLP + _HEAD,
        ignored_prefixes=("model.layers.{layers}.",),
        qkv_bias=True,
        qk_norm=QkNorm.per_head,
        optional={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        moe=True,
        sigmoid_router=True,
        ropes=("default",),
        partial_rotary=0.5,
        refused_options=("use_sliding_window",),
        defaults={
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
    ),
    # DeepSeek-V3 and R1. Rotary embeddings without yarn: vLLM 0.32 on a CPU rotates neighboring
    # pairs of several heads wrongly (tests/contracts/test_families.py).
    Family(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        _EMBEDDING + _LATENT_ATTENTION + _DENSE_MLP + _GLM_MOE_MLP + _HEAD,
        ignored_prefixes=("model.layers.{layers}.",),
        moe=True,
        sigmoid_router=True,
        latent=True,
        expert_groups=True,
        ropes=("yarn",),
        refused_options=("attention_bias", "use_sliding_window"),
        defaults={
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
    ),
    Family(
        "mistral",
        ("MistralForCausalLM",),
        _DENSE,
        sliding_window=True,
        defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096},
    ),
    # Phi-3 and Phi-4; those with long contexts have a rotary embedding of type longrope.
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        _DENSE,
        fused=(
            Fused(
                "self_attn.qkv_proj.weight",
                tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
            ),
            Fused("mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        ),
        sliding_window=True,
        ropes=("default",),
        partial_rotary=1.0,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        "olmo2",
        ("Olmo2ForCausalLM",),
        _EMBEDDING + _OLMO2_ATTENTION + _OLMO2_MLP + _HEAD,
        qk_norm=QkNorm.all_heads,
        norms_after=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    # An OLMo-2 with windows in three of four layers; yarn applies only to the fourth.
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        _EMBEDDING + _OLMO2_ATTENTION + _OLMO2_MLP + _HEAD,
        qk_norm=QkNorm.all_heads,
        norms_after=True,
        sliding_window=True,
        full_every=4,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
    ),
)

# Popular architectures that are not supported, with the reason.
REFUSED = {
    "MiMoForCausalLM": "transformers has it only as remote code, which is never run here. MiMo-7B "
    "is a Qwen2 with layers for multi-token prediction, which training ignores: set architectures "
    'to ["Qwen2ForCausalLM"] and model_type to "qwen2" in config.json, and remove auto_map',
    "GptOssForCausalLM": "of Megatron's attentions only DotProductAttention has attention sinks on "
    "a CPU, and that takes no packed sequences; torch's, which the actor uses there, has none",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash has latent attention, which trains only on a CPU, "
    "without yarn, whose rotary embedding vLLM's CPU kernel computes wrongly",
    "Gemma3ForCausalLM": "its norms stand before and after attention and feed-forward and multiply "
    "by 1 plus their weight, its feed-forward is GELU's, and its embedding is scaled; the actor "
    "computes none of these",
    "Qwen3NextForCausalLM": "the gated delta net of megatron-core 0.16 takes no packed sequences "
    "(later versions do) and needs the Triton kernels of flash-linear-attention, and vLLM's CPU "
    "kernel computes only in bfloat16",
}

FAMILY_PLUGINS: Registry[Callable[[], Family], NoTraits] = Registry("model family", NoTraits)


def families() -> tuple[Family, ...]:
    """rlmath's own, then those of plug-ins."""
    return (*FAMILIES, *(FAMILY_PLUGINS.get(name)() for name in FAMILY_PLUGINS.in_order()))


def family_of(architecture: str) -> Family:
    """The family of an architecture; ``ModelError`` lists the supported ones."""
    # A plug-in's function may ask for one of rlmath's own.
    plugins = (FAMILY_PLUGINS.get(name)() for name in FAMILY_PLUGINS.in_order())
    for family in itertools.chain(FAMILIES, plugins):
        if architecture in family.architectures:
            return family
    why = f": {REFUSED[architecture]}" if architecture in REFUSED else ""
    names = ", ".join(name for family in families() for name in family.architectures)
    raise ModelError(f"architecture {architecture} is not supported{why}; supported: {names}")
