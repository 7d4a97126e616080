"""One table per model family: which Megatron parameter holds which Hugging Face tensors, and how.

Adding a family is adding a ``Family`` to ``FAMILIES``. ``{layer}`` and ``{expert}`` stand for
numbers that count over the whole model on the Hugging Face side. Sizes are names that
``ModelShape.size`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlmath.model.spec import ModelShape, WeightsError


class Rule(Enum):
    """How tensor-parallel ranks share a parameter."""

    # Every rank holds all of it.
    replicated = "replicated"
    # Rows (output features) are cut into equal runs.
    column = "column"
    # Columns (input features) are cut into equal runs.
    row = "row"
    # Query, key and value in one matrix, interleaved: for each key-value group its query heads,
    # its key head, its value head. The rows of that matrix are cut into equal runs, so with more
    # ranks than groups a run holds part of a group.
    qkv = "qkv"
    # Gate and up in one matrix: each rank holds its run of gate, then its run of up.
    gate_up = "gate_up"
    # Rows are tokens: padded at the end to a multiple of the ranks, then cut into equal runs.
    vocabulary = "vocabulary"


class When(Enum):
    """Which models and layers have an entry."""

    always = "always"
    qkv_bias = "qkv_bias"
    qk_norm = "qk_norm"
    untied = "untied"
    # Megatron keeps a second copy of a tied embedding where first and last stage differ.
    tied = "tied"
    dense_layer = "dense_layer"
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
        hf: The Hugging Face tensors that it holds.
        rule: How ranks share it.
        when: Which models and layers have it.
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

    def applies(self, shape: ModelShape, layer: int | None = None) -> bool:
        """Whether a model has it, and for entries of a layer, whether that layer has it."""
        if self.when is When.dense_layer:
            return layer is not None and not shape.is_moe_layer(layer)
        if self.when is When.moe_layer:
            return layer is not None and shape.is_moe_layer(layer)
        return {
            When.always: True,
            When.qkv_bias: shape.qkv_bias,
            When.qk_norm: shape.qk_norm,
            When.untied: not shape.tied,
            When.tied: shape.tied,
        }[self.when]


@dataclass(frozen=True)
class Family:
    """Models whose tensors have the same names.

    Attributes:
        name: For messages and ``rlmath plan weights``.
        architectures: Values of ``architectures`` in config.json.
        entries: The table, in the order in which tensors are written and sent.
        ignored_suffixes: Endings of tensor names that files may hold and nobody reads.
        qkv_bias: Query, key and value have biases.
        qk_norm: Queries and keys are normalized per head.
        moe: Some layers are mixtures of experts.
        has_attention_bias_option: config.json may ask for biases that the table does not list.
    """

    name: str
    architectures: tuple[str, ...]
    entries: tuple[Entry, ...]
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: bool = False
    has_attention_bias_option: bool = True


_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

_EMBEDDING = (
    Entry(
        ("embedding.word_embeddings.weight",),
        (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        Rule.vocabulary,
    ),
)

_ATTENTION = (
    Entry(
        (_M + "input_layernorm.weight", _M + "self_attention.linear_qkv.layer_norm_weight"),
        (HfTensor(_H + "input_layernorm.weight", ("hidden",)),),
        Rule.replicated,
    ),
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
    Entry(
        (_M + "self_attention.linear_proj.weight",),
        (HfTensor(_H + "self_attn.o_proj.weight", ("hidden", "query")),),
        Rule.row,
    ),
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

FAMILIES = (
    # Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen.
    Family("qwen2", ("Qwen2ForCausalLM",), _DENSE, qkv_bias=True, has_attention_bias_option=False),
    Family("qwen3", ("Qwen3ForCausalLM",), _DENSE, qk_norm=True),
    # Llama 3, 3.1, 3.2 and DeepSeek-R1-Distill-Llama.
    Family("llama3", ("LlamaForCausalLM",), _DENSE),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        _EMBEDDING + _ATTENTION + _DENSE_MLP + _QWEN_MOE_MLP + _HEAD,
        qk_norm=True,
        moe=True,
    ),
)


def family_of(architecture: str) -> Family:
    """The family of an architecture; raises ``WeightsError`` naming those that there are."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise WeightsError(f"no weight table for architecture {architecture!r}; there are: {known}")
