"""The model spec: sizes and family, from config.json. Nothing else reads that file;
:mod:`rlmath.model.rope` parses its rotary embeddings.

Needs neither torch nor transformers.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.errors import ModelError
from rlmath.model.config_fields import FULL, LINEAR, WINDOWED, Fields
from rlmath.model.families import Entry, Family, QkNorm, When, family_of
from rlmath.model.folder import TINY
from rlmath.model.rope import Rope, read_partial_rotary, read_positions, read_ropes

# Possible types of the weights in config.json.
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads come from one narrow vector, and the rotated part of each key from
    a second one that all heads share.
    """

    query_rank: int  # Width of the vector that queries come from.
    kv_rank: int  # Width of the vector that keys and values come from.
    content_dim: int  # Width of the part of a query or key head that is not rotated.
    rotary_dim: int  # Width of the rotated part.
    value_dim: int  # Width of a value head.


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta net (GDN; Yang et al. 2024, arXiv:2412.06464), attention with a state of fixed
    size.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, a multiple of ``key_heads``: neighbors share a key head.
        key_head_dim: Width of a query or key head.
        value_head_dim: Width of a value head.
        conv_width: Tokens that the causal convolution of queries, keys and values sees.
    """

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def key_width(self) -> int:
        """Width of all query heads, and of all key heads."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Width of queries, keys and values together, which the convolution sees."""
        return 2 * self.key_width + self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in an engine: of the heads in float32, and the last inputs of
        the convolution in bfloat16."""
        heads = 4 * self.value_width * self.key_head_dim
        return heads + 2 * (self.conv_width - 1) * self.conv_channels


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model.

    Attributes:
        architecture: Name in config.json, such as ``Qwen2ForCausalLM``.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key-value heads (groups of query heads).
        head_dim: Width of one query head; ``heads * head_dim`` need not be ``hidden``.
        ffn: Width of a dense layer's feed-forward.
        vocab: Rows of the embedding in the Hugging Face files, without padding.
        tied: The output layer is the embedding.
        norm_eps: Epsilon of all RMS norms.
        rope: Rotary position embedding.
        max_positions: Maximum sequence length, in tokens.
        partial_rotary: Share of a head that is rotated, from its first element on.
        sliding_window: Number of tokens that a token of a windowed layer attends to, including
            itself; ``None``: no layer has a window.
        full_layers: Layers without a window, in a model with windows.
        window_rope: Rotary position embedding of the windowed layers; ``None``: ``rope``.
        experts: Experts of an MoE layer; 0 for a dense model.
        experts_per_token: Experts per token.
        moe_ffn: Width of one expert.
        dense_layers: Layers of an MoE model with an ordinary feed-forward.
        norm_topk_prob: The selected experts' weights are normalized to 1.
        shared_ffn: Total width of the experts that every token uses; 0: none.
        routed_scaling: Factor of the selected experts' weights.
        latent: Widths of multi-head latent attention, if the model has it.
        linear: Sizes of the linear-attention layers, if the model has any.
        linear_layers: Layers with linear attention instead of attention.
        expert_groups: Number of groups of experts; a token uses only the best groups.
        groups_per_token: Groups that a token uses.
        without: Optional features of the family that this model lacks.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    norm_eps: float
    rope: Rope
    max_positions: int
    partial_rotary: float = 1.0
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    window_rope: Rope | None = None
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    norm_topk_prob: bool = True
    shared_ffn: int = 0
    routed_scaling: float = 1.0
    latent: Latent | None = None
    linear: LinearAttention | None = None
    linear_layers: tuple[int, ...] = ()
    expert_groups: int = 1
    groups_per_token: int = 1
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} query heads do not divide into {self.kv_heads} key-value groups: "
                f"{self.heads} / {self.kv_heads} leaves {self.heads % self.kv_heads}"
            )

    @property
    def family(self) -> Family:
        return family_of(self.architecture)

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value have biases."""
        return self.family.qkv_bias and "qkv_bias" not in self.without

    @property
    def qk_norm(self) -> QkNorm:
        """How queries and keys are normalized."""
        return QkNorm.none if "qk_norm" in self.without else self.family.qk_norm

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that is rotated."""
        if self.latent is not None:
            return self.latent.rotary_dim
        return int(self.head_dim * self.partial_rotary)

    @property
    def value_width(self) -> int:
        """Width of attention's output: of the values of all query heads."""
        width = self.head_dim if self.latent is None else self.latent.value_dim
        return self.heads * width

    def is_windowed(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (from 0) attends only to its last tokens."""
        return self.sliding_window is not None and layer not in self.full_layers

    def is_linear_layer(self, layer: int) -> bool:
        return layer in self.linear_layers

    def is_moe_layer(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def moe_layers(self) -> int:
        return self.layers - len(self.dense_layers) if self.experts else 0

    def has(self, entry: Entry, layer: int | None = None) -> bool:
        """Whether the model has a table entry; for a layer's entry, in that layer."""
        if entry.when is When.dense_layer:
            return layer is not None and not self.is_moe_layer(layer)
        if entry.when is When.moe_layer:
            return layer is not None and self.is_moe_layer(layer)
        if entry.when is When.shared_experts:
            return layer is not None and self.is_moe_layer(layer) and self.shared_ffn > 0
        if entry.when is When.linear_layer:
            return layer is not None and self.is_linear_layer(layer)
        if entry.when is When.attention_layer:
            return layer is not None and not self.is_linear_layer(layer)
        return {
            When.always: True,
            When.qkv_bias: self.qkv_bias,
            When.qk_norm: self.qk_norm is QkNorm.per_head,
            When.untied: not self.tied,
            When.tied: self.tied,
        }[entry.when]

    def size(self, dimension: str) -> int:
        """Size of a named dimension of the tables in ``families.py``."""
        sizes = {
            "hidden": self.hidden,
            "query": self.heads * self.head_dim,
            "key_value": self.kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "ffn": self.ffn,
            "moe_ffn": self.moe_ffn,
            "shared_ffn": self.shared_ffn,
            "experts": self.experts,
            "vocab": self.vocab,
            "one": 1,
            "query_and_gate": 2 * self.heads * self.head_dim,
        }
        if self.linear is not None:
            delta = self.linear
            sizes |= {
                "delta_conv": delta.conv_channels,
                "delta_conv_gate": delta.conv_channels + delta.value_width,
                "delta_value": delta.value_width,
                "delta_heads": delta.value_heads,
                "delta_two_heads": 2 * delta.value_heads,
                "delta_head_dim": delta.value_head_dim,
                "conv_width": delta.conv_width,
            }
        if self.latent is not None:
            one = self.latent
            sizes |= {
                "query_rank": one.query_rank,
                "kv_rank": one.kv_rank,
                "kv_rank_and_rotary": one.kv_rank + one.rotary_dim,
                "content_and_value": self.heads * (one.content_dim + one.value_dim),
                "value": self.value_width,
            }
        return sizes[dimension]

    # Cached: the planner asks for each of thousands of layouts.
    @functools.cached_property
    def num_parameters(self) -> int:
        """Number of weights of the model, counting a tied embedding once."""
        return sum(self._count(entry) for entry in self.family.entries)

    @functools.cached_property
    def num_expert_parameters(self) -> int:
        """Number of weights of all experts, which expert-parallel ranks share."""
        return sum(self._count(entry) for entry in self.family.entries if entry.per_expert)

    def _count(self, entry: Entry) -> int:
        """Weights of an entry, over all layers and experts; 0 for a copy of another entry."""
        if entry.when is When.tied:
            return 0
        if entry.per_layer:
            copies = sum(self.has(entry, layer) for layer in range(self.layers))
        else:
            copies = int(self.has(entry))
        copies *= self.experts if entry.per_expert else 1
        return copies * sum(math.prod(map(self.size, tensor.dims)) for tensor in entry.hf)


def padded_vocab_size(vocab: int, tp_size: int) -> int:
    """Rows of the embedding in Megatron: the next number that TP ranks share equally. ``vocab``:
    rows in the Hugging Face files."""
    return -(-vocab // tp_size) * tp_size


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder, to be copied; ``read_model_spec`` interprets it. Raises
    ModelError: the folder or the file is missing, or is not a JSON object."""
    path = Path(folder) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (Path(folder) / ADAPTER_FILE).is_file():
            raise ModelError(adapter_instead(Path(folder))) from None
        raise ModelError(
            f"no config.json in {folder}: a Hugging Face model folder has config.json, "
            "*.safetensors and a tokenizer"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}; use the file that was published with the model"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, not an object")
    return config


def adapter_instead(folder: Path) -> str:
    """The error for the folder of a LoRA adapter in place of a model's."""
    try:
        base = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
        name = base["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        name = "another model"
    return (
        f"{folder} holds a LoRA adapter of {name}, not a model: merge it with peft "
        "(AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()) "
        "and give the merged folder with its tokenizer"
    )


def read_model_spec(folder: str | Path) -> ModelSpec:
    """The model in a Hugging Face folder, or the tiny model, which a run creates. Raises
    ModelError: as ``read_config`` and ``model_spec`` do."""
    if str(folder) == TINY:
        from rlmath.model.tiny import tiny_config

        return model_spec(tiny_config(), TINY)
    return model_spec(read_config(folder), str(Path(folder) / CONFIG_FILE))


def model_spec(config: Mapping[str, Any], source: str = CONFIG_FILE) -> ModelSpec:
    """The model that a config.json describes. Raises ModelError: a field is missing or invalid, or
    the architecture or a feature is unsupported; the message names the file, the field and what
    works.

    Args:
        config: Contents of config.json, in the form of transformers 5 (``rope_parameters``) or
            older (``rope_theta`` and ``rope_scaling``).
        source: Where the contents are from, for messages.
    """
    try:
        return _spec(config)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields(config)
    family = family_of(_architecture(fields))
    fields = Fields({**family.defaults, **config})
    _refuse_unsupported(fields, family)
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    layers = fields.whole("num_hidden_layers")
    # Qwen's published files have num_experts, transformers 5 saves num_local_experts, GLM's have
    # n_routed_experts.
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    key = next((key for key in keys if fields.given.get(key) is not None), keys[0])
    experts = fields.whole(key) if family.moe else 0
    if family.sigmoid_router:
        _refuse_other_routers(fields, family)
    if family.gated_attention:
        _refuse_other_gates(fields)
    latent = _latent(fields) if family.latent else None
    linear_layers = _linear_layers(fields, layers) if family.linear_attention else ()
    if experts and fields.whole("num_experts_per_tok") == 1 and fields.flag("norm_topk_prob"):
        raise ModelError(
            "num_experts_per_tok is 1 with norm_topk_prob: the weight of the one chosen expert is "
            "always 1, so its router cannot learn; models of this kind are not supported"
        )
    rope, window_rope = read_ropes(fields, family)
    has_window = family.sliding_window and fields.given.get("sliding_window") is not None
    return ModelSpec(
        architecture=_architecture(fields),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads) if latent is None else heads,
        # In DeepSeek's config.json head_dim is only the rotated part.
        head_dim=fields.whole("head_dim", hidden // heads)
        if latent is None
        else latent.content_dim + latent.rotary_dim,
        # A model whose layers are all MoE need not have it.
        ffn=fields.whole("intermediate_size", fields.given.get("moe_intermediate_size")),
        vocab=fields.whole("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        max_positions=read_positions(fields, rope),
        partial_rotary=read_partial_rotary(fields, family),
        sliding_window=fields.whole("sliding_window") if has_window else None,
        full_layers=_full_layers(fields, family, layers) if has_window else (),
        window_rope=window_rope if has_window else None,
        experts=experts,
        experts_per_token=fields.whole("num_experts_per_tok") if experts else 0,
        moe_ffn=fields.whole("moe_intermediate_size") if experts else 0,
        dense_layers=_dense_layers(fields, layers) if experts else (),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        shared_ffn=_shared_ffn(fields) if experts else 0,
        routed_scaling=fields.number("routed_scaling_factor", 1.0),
        latent=latent,
        linear=_linear(fields) if linear_layers else None,
        linear_layers=linear_layers,
        expert_groups=fields.whole("n_group", 1) if family.expert_groups else 1,
        groups_per_token=fields.whole("topk_group", 1) if family.expert_groups else 1,
        without=tuple(name for name, key in family.optional.items() if not fields.flag(key)),
    )


def _architecture(fields: Fields) -> str:
    names = fields.given.get("architectures")
    if not isinstance(names, list | tuple) or not names:
        raise ModelError("no field architectures, which names the class of the model")
    return str(names[0])


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """Refuse features that would load silently and then compute something else."""
    given = fields.given
    if given.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act is {given['hidden_act']!r}; only silu is supported")
    for option in family.refused_options:
        if fields.flag(option):
            raise ModelError(
                f"{option} is true; {', '.join(family.architectures)} is supported without it"
            )
    known = {FULL}
    known |= {WINDOWED} if family.full_every else {LINEAR} if family.linear_attention else set()
    types = given.get("layer_types") or []
    layers = fields.whole("num_hidden_layers")
    if not isinstance(types, list | tuple):
        raise ModelError(f"layer_types is {types!r}, and has to be a list")
    other = sorted(set(map(str, types)) - known)
    if other:
        raise ModelError(
            f"layer_types has {', '.join(other)}; supported: {', '.join(sorted(known))}"
        )
    if len(types) not in (0, layers):
        raise ModelError(f"layer_types has {len(types)} entries for {layers} layers")
    if given.get("quantization_config"):
        raise ModelError("quantization_config is set; train from unquantized weights")
    # transformers looks it up as an attribute of torch.
    dtype = given.get("dtype") or given.get("torch_dtype") or WEIGHT_DTYPES[0]
    if dtype not in WEIGHT_DTYPES:
        raise ModelError(f"dtype is {dtype!r} and none of {', '.join(WEIGHT_DTYPES)}")


def _full_layers(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Layers without a window: none, those listed in config.json, or every N-th."""
    every, types = family.full_every, fields.given.get("layer_types")
    if not every:
        if types:
            raise ModelError(
                "layer_types and sliding_window: transformers gives every layer the window, and "
                "vLLM only those listed; remove layer_types, or set sliding_window to null"
            )
        return ()
    if types is None:
        return tuple(n for n in range(layers) if (n + 1) % every == 0)
    if len(types) != layers:
        raise ModelError(f"layer_types has {len(types)} entries for {layers} layers")
    return tuple(n for n, kind in enumerate(types) if kind == FULL)


def _linear_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers with linear attention: those listed in config.json, or all but every N-th."""
    types = fields.given.get("layer_types")
    every = fields.whole("full_attention_interval", 4)
    if not types:
        return tuple(n for n in range(layers) if (n + 1) % every)
    return tuple(n for n, kind in enumerate(types) if kind == LINEAR)


def _linear(fields: Fields) -> LinearAttention:
    """Sizes of a gated delta net."""
    one = LinearAttention(
        key_heads=fields.whole("linear_num_key_heads"),
        value_heads=fields.whole("linear_num_value_heads"),
        key_head_dim=fields.whole("linear_key_head_dim"),
        value_head_dim=fields.whole("linear_value_head_dim"),
        conv_width=fields.whole("linear_conv_kernel_dim"),
    )
    if one.value_heads % one.key_heads:
        raise ModelError(
            f"linear_num_value_heads={one.value_heads} is no multiple of "
            f"linear_num_key_heads={one.key_heads}"
        )
    return one


def _refuse_other_gates(fields: Fields) -> None:
    """Refuse options that vLLM reads and transformers' models do not have."""
    usual = {
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "silu", "swish"),
        "layer_scale": (None, False),
        "qkv_bias": (None, False),
    }
    for key, values in usual.items():
        if fields.given.get(key) not in values:
            raise ModelError(
                f"{key} is {fields.given[key]!r}: vLLM reads it, and transformers and the actor "
                f"compute with {values[1]!r}; models of this kind are not supported"
            )


def _refuse_other_routers(fields: Fields, family: Family) -> None:
    """Refuse other routers: Megatron's sigmoid router normalizes the selected weights, and scores a
    group by as many of its experts as a token uses per group."""
    if not fields.flag("norm_topk_prob"):
        raise ModelError(
            "norm_topk_prob is false; experts of sigmoid routers are supported with it"
        )
    if not family.expert_groups:
        for key in ("n_group", "topk_group"):
            if fields.whole(key, 1) != 1:
                raise ModelError(
                    f"{key} is {fields.given[key]}; experts are supported in one group"
                )
        return
    # vLLM creates the selection bias only for this name.
    for key, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if fields.given.get(key) != value:
            raise ModelError(
                f"{key} is {fields.given.get(key)!r}, and has to be {value!r}, as in the "
                "config.json that was published with the model: vLLM reads it, and transformers "
                "leaves it out where it saves a model"
            )
    experts, groups = fields.whole("n_routed_experts"), fields.whole("n_group", 1)
    chosen, most = fields.whole("topk_group", 1), fields.whole("num_experts_per_tok")
    if groups > 1 and (experts % groups or chosen > groups or most != 2 * chosen):
        raise ModelError(
            f"{most} of {experts} experts for each token from topk_group={chosen} of "
            f"n_group={groups}: groups are supported that share the experts evenly, with "
            "num_experts_per_tok twice topk_group"
        )


def _latent(fields: Fields) -> Latent:
    """Widths of multi-head latent attention."""
    if fields.given.get("q_lora_rank") is None:
        raise ModelError(
            "q_lora_rank is null (as of Moonlight); multi-head latent attention is supported with "
            "queries that come from a latent vector too"
        )
    if not fields.given.get("rope_interleave", True):
        raise ModelError("rope_interleave is false; vLLM takes rotary pairs for neighbors")
    rotary = fields.whole("qk_rope_head_dim")
    if (head := fields.whole("head_dim", rotary)) != rotary:
        raise ModelError(
            f"head_dim={head} and qk_rope_head_dim={rotary}: transformers rotates head_dim values "
            "of a head, and the others qk_rope_head_dim; leave head_dim out"
        )
    return Latent(
        query_rank=fields.whole("q_lora_rank"),
        kv_rank=fields.whole("kv_lora_rank"),
        content_dim=fields.whole("qk_nope_head_dim"),
        rotary_dim=rotary,
        value_dim=fields.whole("v_head_dim"),
    )


def _shared_ffn(fields: Fields) -> int:
    """Width of the shared experts; 0 if there are none."""
    if fields.given.get("shared_expert_intermediate_size"):
        return fields.whole("shared_expert_intermediate_size")
    if not fields.given.get("n_shared_experts"):
        return 0
    return fields.whole("n_shared_experts") * fields.whole("moe_intermediate_size")


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """GLM's first layers are dense. Qwen: every ``decoder_sparse_step``-th layer is an MoE, unless
    listed otherwise."""
    first = fields.given.get("first_k_dense_replace")
    if first is not None:
        return tuple(range(min(int(first), layers)))
    step = fields.whole("decoder_sparse_step", 1)
    listed = set(fields.given.get("mlp_only_layers") or ())
    return tuple(n for n in range(layers) if n in listed or (n + 1) % step)
