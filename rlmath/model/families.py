"""One table per model family: mapping between Megatron parameters and Hugging Face tensors.

To add a family, add a ``Family`` to ``FAMILIES``; a plug-in registers a function that returns one
with ``FAMILY_PLUGINS``. Tables are composed of those in :mod:`rlmath.model.tables`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from rlmath.errors import ModelError
from rlmath.model.family import Entry, Family, Fused, HfTensor, QkNorm, Rule, When
from rlmath.model.tables import (
    ATTENTION,
    DELTA_NET,
    DELTA_NET_BY_HEAD,
    DENSE,
    DENSE_MLP,
    EMBEDDING,
    GATED_ATTENTION,
    GLM_MOE_MLP,
    HEAD,
    INPUT_NORM,
    LATENT_ATTENTION,
    MLP_NORM,
    OLMO2_ATTENTION,
    OLMO2_MLP,
    QWEN_MOE_MLP,
    SHARED_EXPERT,
)
from rlmath.plugins import NoTraits, Registry

__all__ = ["Entry", "Family", "Fused", "HfTensor", "QkNorm", "Rule", "When"]


def _hybrid(name: str, architecture: str, delta: tuple[Entry, ...], moe: bool) -> Family:
    """A family of Qwen's with gated delta nets."""
    mlp = (*DENSE_MLP, *QWEN_MOE_MLP, *SHARED_EXPERT) if moe else DENSE_MLP
    layer = (INPUT_NORM, *GATED_ATTENTION, *delta, MLP_NORM, *mlp)
    return Family(
        name,
        (architecture,),
        EMBEDDING + layer + HEAD,
        ignored_prefixes=("mtp.",),
        qk_norm=QkNorm.per_head,
        linear_attention=True,
        gated_attention=True,
        zero_centered_norms=True,
        moe=moe,
        shared_expert_gate=moe,
        ropes=("default",),
        partial_rotary=0.25,
        defaults={"rms_norm_eps": 1e-6, "head_dim": 256}
        | ({"norm_topk_prob": True} if moe else {}),
    )


FAMILIES = (
    # Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen. They always have the biases, without an option.
    # MiMo-7B is a Qwen2 with layers for multi-token prediction.
    Family(
        "qwen2",
        ("Qwen2ForCausalLM",),
        DENSE,
        ignored_prefixes=("model.mtp_layers.",),
        qkv_bias=True,
        refused_options=("use_sliding_window",),
        defaults={"rms_norm_eps": 1e-6},
    ),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        DENSE,
        qk_norm=QkNorm.per_head,
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
    ),
    # Llama 3, 3.1, 3.2 and DeepSeek-R1-Distill-Llama.
    Family("llama3", ("LlamaForCausalLM",), DENSE, defaults={"rms_norm_eps": 1e-6}),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        EMBEDDING + ATTENTION + DENSE_MLP + QWEN_MOE_MLP + HEAD,
        qk_norm=QkNorm.per_head,
        moe=True,
        defaults={"rms_norm_eps": 1e-6},
    ),
    # GLM-4.5 and GLM-4.5-Air.
    Family(
        "glm4_moe",
        ("Glm4MoeForCausalLM",),
        EMBEDDING + ATTENTION + DENSE_MLP + GLM_MOE_MLP + HEAD,
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
        EMBEDDING + LATENT_ATTENTION + DENSE_MLP + GLM_MOE_MLP + HEAD,
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
    # Qwen3.5, Qwen3.6 and Qwen3-Next, text only.
    _hybrid("qwen3_5", "Qwen3_5ForCausalLM", DELTA_NET, moe=False),
    _hybrid("qwen3_5_moe", "Qwen3_5MoeForCausalLM", DELTA_NET, moe=True),
    _hybrid("qwen3_next", "Qwen3NextForCausalLM", DELTA_NET_BY_HEAD, moe=True),
    Family(
        "mistral",
        ("MistralForCausalLM",),
        DENSE,
        sliding_window=True,
        defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096},
    ),
    # Phi-3 and Phi-4; those with long contexts have a rotary embedding of type longrope.
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        DENSE,
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
        EMBEDDING + OLMO2_ATTENTION + OLMO2_MLP + HEAD,
        qk_norm=QkNorm.all_heads,
        norms_after=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    # An OLMo-2 with windows in three of four layers; yarn applies only to the fourth.
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        EMBEDDING + OLMO2_ATTENTION + OLMO2_MLP + HEAD,
        qk_norm=QkNorm.all_heads,
        norms_after=True,
        sliding_window=True,
        full_every=4,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
    ),
)

_WITH_IMAGES = (
    "it has an image encoder; save its text model, with transformers: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder), and the tokenizer"
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
    "Qwen3_5ForConditionalGeneration": _WITH_IMAGES,
    "Qwen3_5MoeForConditionalGeneration": _WITH_IMAGES,
    "OlmoHybridForCausalLM": "its norms follow attention and feed-forward in layers with attention "
    "and precede them in layers with linear attention; a family has them in one place",
    "Gemma3ForCausalLM": "its norms stand before and after attention and feed-forward, its "
    "feed-forward is GELU's, and its embedding is scaled; the actor computes none of these",
    "NemotronHForCausalLM": "each of its layers is one of Mamba-2, attention and feed-forward "
    "behind one norm; a layer of the actor has attention and a feed-forward",
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
