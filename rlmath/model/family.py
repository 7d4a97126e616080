"""Description of a model family: its traits, and its table of parameters and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Rule(Enum):
    """How tensor-parallel ranks share a parameter."""

    # Every rank has all of it.
    replicated = "replicated"
    # Rows (output features) are split into equal slices.
    column = "column"
    # Columns (input features) are split into equal slices.
    row = "row"
    # Query, key and value in one matrix, interleaved: for each key-value group its query heads, the
    # gates of those if attention is gated, its key head, its value head. The rows are split into
    # equal slices, so with more ranks than groups a slice is part of a group.
    qkv = "qkv"
    # Queries, keys, values, gates, betas and alphas of linear attention in one matrix: each rank
    # has its slice of each. The files have them one after the other (Qwen3.5) ...
    delta_in = "delta_in"
    # ... or those of each key head together (Qwen3-Next).
    delta_in_by_head = "delta_in_by_head"
    # The convolution's channels: each rank has its slice of queries, of keys and of values.
    delta_conv = "delta_conv"
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
    linear_layer = "linear_layer"
    attention_layer = "attention_layer"


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
        name: Name in messages.
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
        linear_attention: Layers can have linear attention (a gated delta net): those listed in
            config.json's ``layer_types``, or all but every N-th (``full_attention_interval``).
        gated_attention: Each query head's output is multiplied by the sigmoid of a gate, which
            follows the head in ``q_proj``.
        zero_centered_norms: Norms multiply by 1 plus their weight, except linear attention's.
        shared_expert_gate: The shared expert's output is multiplied by the sigmoid of a gate.
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
    linear_attention: bool = False
    gated_attention: bool = False
    zero_centered_norms: bool = False
    shared_expert_gate: bool = False
    expert_groups: bool = False
    optional: Mapping[str, str] = field(default_factory=dict)
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    partial_rotary: float | None = None
    refused_options: tuple[str, ...] = ("attention_bias", "mlp_bias", "use_sliding_window")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    vllm: str = ""
