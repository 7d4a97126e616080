"""Sizes of a model's tensors, read from config.json without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.errors import UserError


class WeightsError(UserError):
    """Weights that are missing, unknown, of another shape, or cannot be laid out as asked."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: Base of the frequencies.
        kind: ``default``, ``llama3``, ``yarn``, ``linear`` or ``dynamic``, as config.json has it.
        parameters: The other fields of the scaling, such as ``factor``; empty for ``default``.
    """

    theta: float
    kind: str
    parameters: Mapping[str, float]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one decoder-only model.

    Attributes:
        architecture: As config.json names it, such as ``Qwen2ForCausalLM``.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key-value heads (groups of query heads).
        head_dim: Width of one head; ``heads * head_dim`` need not be ``hidden``.
        ffn: Width of a dense layer's feed-forward.
        vocab: Rows of the embedding in the Hugging Face files, before any padding of ours.
        tied: The output layer is the embedding.
        qkv_bias: Query, key and value have biases.
        qk_norm: Queries and keys are normalized per head.
        norm_eps: Epsilon of all RMS norms.
        rope: Rotary position embedding.
        max_positions: Longest sequence that the model was made for, in tokens.
        experts: Experts of a mixture layer; 0 for a dense model.
        experts_per_token: Experts that a token goes to.
        moe_ffn: Width of one expert.
        dense_layers: Layers of a mixture model that have an ordinary feed-forward.
        norm_topk_prob: The chosen experts' weights are normalized to 1.
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
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: Rope
    max_positions: int
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise WeightsError(
                f"{self.heads} query heads do not divide into {self.kv_heads} key-value groups: "
                f"{self.heads} / {self.kv_heads} leaves {self.heads % self.kv_heads}"
            )

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (from 0) is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def size(self, dimension: str) -> int:
        """Length of a named dimension of the tables in ``families.py``."""
        sizes = {
            "hidden": self.hidden,
            "query": self.heads * self.head_dim,
            "key_value": self.kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "ffn": self.ffn,
            "moe_ffn": self.moe_ffn,
            "experts": self.experts,
            "vocab": self.vocab,
        }
        return sizes[dimension]


def padded_vocab_size(vocab: int, tp_size: int, multiple: int = 1) -> int:
    """Rows of the embedding in Megatron: the next number that TP ranks share evenly.

    Args:
        vocab: Rows in the Hugging Face files.
        tp_size: Tensor-parallel ranks.
        multiple: Each rank's share is a multiple of it as well.
    """
    step = tp_size * multiple
    return -(-vocab // step) * step


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        WeightsError: The folder or the file is missing, or it is not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"no config.json in {folder}: a Hugging Face model folder has config.json, "
            "*.safetensors and a tokenizer"
        ) from None
    except json.JSONDecodeError as error:
        raise WeightsError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{path} holds a {type(config).__name__}, not an object")
    return config


def read_model_shape(folder: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face folder; raises ``WeightsError`` as its parts do."""
    return model_shape(read_config(folder))


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes.

    Args:
        config: Contents of config.json, in the form of transformers 5 (``rope_parameters``) or
            older (``rope_theta`` and ``rope_scaling``).

    Raises:
        WeightsError: A field is missing, the architecture has no table in ``families.py``, or a
            feature is on that the tables do not cover.
    """
    # Here and not above: families.py needs ModelShape.
    from rlmath.model.families import family_of

    architecture = (_get(config, "architectures") or ["none"])[0]
    family = family_of(architecture)
    _refuse_unsupported(config, architecture, family.has_attention_bias_option)
    heads = int(_get(config, "num_attention_heads"))
    hidden = int(_get(config, "hidden_size"))
    layers = int(_get(config, "num_hidden_layers"))
    # Published files say num_experts, transformers 5 saves num_local_experts.
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = int(_get(config, key)) if family.moe else 0
    return ModelShape(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn=int(_get(config, "intermediate_size")),
        vocab=int(_get(config, "vocab_size")),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        max_positions=int(config.get("max_position_embeddings", 32768)),
        experts=experts,
        experts_per_token=int(_get(config, "num_experts_per_tok")) if experts else 0,
        moe_ffn=int(_get(config, "moe_intermediate_size")) if experts else 0,
        dense_layers=_dense_layers(config, layers) if experts else (),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
    )


def _get(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise WeightsError(f"config.json has no {key!r}")
    return config[key]


def _refuse_unsupported(
    config: Mapping[str, Any], architecture: str, has_attention_bias_option: bool
) -> None:
    """Features that would load without complaint and then compute something else."""
    if config.get("hidden_act", "silu") != "silu":
        raise WeightsError(f"hidden_act is {config['hidden_act']!r}; the families here use silu")
    if config.get("use_sliding_window"):
        raise WeightsError("use_sliding_window is true; only full attention is supported")
    if has_attention_bias_option and config.get("attention_bias"):
        raise WeightsError(f"attention_bias is true; {architecture} is supported without it")
    if config.get("mlp_bias"):
        raise WeightsError(f"mlp_bias is true; {architecture} is supported without it")
    if config.get("quantization_config"):
        raise WeightsError("quantization_config is set; train from unquantized weights")


def _rope(config: Mapping[str, Any]) -> Rope:
    """transformers 5 keeps one dict; before it there were a number and an optional dict."""
    fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = fields.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    fields.pop("type", None)
    if kind == "default":
        fields = {}
    return Rope(float(theta), str(kind), fields)


def _dense_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer is a mixture unless listed otherwise."""
    step = int(config.get("decoder_sparse_step", 1))
    listed = set(config.get("mlp_only_layers") or ())
    return tuple(n for n in range(layers) if n in listed or (n + 1) % step)
