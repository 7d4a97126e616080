"""Sizes of published models by name, so plans and checks need no download."""

from __future__ import annotations

from typing import Any

from rlmath.errors import ModelError, UserError
from rlmath.model.families import REFUSED, family_of
from rlmath.model.spec import ModelSpec, model_spec

# Layers, hidden, feed-forward, heads, key-value heads, vocabulary, tied, positions, from each
# config.json. Tests check the published parameter counts.
_QWEN2 = {
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 151936, True, 32768),
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 151936, True, 131072),
    "Qwen2.5-3B": (36, 2048, 11008, 16, 2, 151936, True, 32768),
    "Qwen2.5-7B": (28, 3584, 18944, 28, 4, 152064, False, 131072),
    "Qwen2.5-14B": (48, 5120, 13824, 40, 8, 152064, False, 131072),
    "Qwen2.5-32B": (64, 5120, 27648, 40, 8, 152064, False, 131072),
    "Qwen2.5-72B": (80, 8192, 29568, 64, 8, 152064, False, 131072),
    "DeepSeek-R1-Distill-Qwen-1.5B": (28, 1536, 8960, 12, 2, 151936, False, 131072),
    "DeepSeek-R1-Distill-Qwen-7B": (28, 3584, 18944, 28, 4, 152064, False, 131072),
    "DeepSeek-R1-Distill-Qwen-14B": (48, 5120, 13824, 40, 8, 152064, False, 131072),
    "DeepSeek-R1-Distill-Qwen-32B": (64, 5120, 27648, 40, 8, 152064, False, 131072),
}
# Qwen3's heads are 128 wide at any hidden size.
_QWEN3 = {
    "Qwen3-0.6B": (28, 1024, 3072, 16, 8, 151936, True, 40960),
    "Qwen3-1.7B": (28, 2048, 6144, 16, 8, 151936, True, 40960),
    "Qwen3-4B": (36, 2560, 9728, 32, 8, 151936, True, 40960),
    "Qwen3-8B": (36, 4096, 12288, 32, 8, 151936, False, 40960),
    "Qwen3-14B": (40, 5120, 17408, 40, 8, 151936, False, 40960),
    "Qwen3-32B": (64, 5120, 25600, 64, 8, 151936, False, 40960),
}
_LLAMA = {
    "Llama-3.2-1B": (16, 2048, 8192, 32, 8, 128256, True, 131072),
    "Llama-3.1-8B": (32, 4096, 14336, 32, 8, 128256, False, 131072),
    "Llama-3.1-70B": (80, 8192, 28672, 64, 8, 128256, False, 131072),
}
# With experts per token, all experts, and the width of one.
_QWEN3_MOE = {
    "Qwen3-30B-A3B": ((48, 2048, 6144, 32, 4, 151936, False, 40960), (8, 128, 768)),
    "Qwen3-235B-A22B": ((94, 4096, 12288, 64, 4, 151936, False, 40960), (8, 128, 1536)),
}
_MISTRAL = {
    "Mistral-7B-v0.3": (32, 4096, 14336, 32, 8, 32768, False, 32768),
    "Mistral-Small-24B-Base-2501": (40, 5120, 32768, 32, 8, 131072, False, 32768),
}
_OLMO2 = {
    "OLMo-2-1124-7B": (32, 4096, 11008, 32, 32, 100352, False, 4096),
    "OLMo-2-1124-13B": (40, 5120, 13824, 40, 40, 100352, False, 4096),
    "OLMo-2-0325-32B": (64, 5120, 27648, 40, 8, 100352, False, 4096),
}
_OLMO3 = {
    "Olmo-3-1025-7B": (32, 4096, 11008, 32, 32, 100278, False, 65536),
    "Olmo-3-1125-32B": (64, 5120, 27648, 40, 8, 100278, False, 65536),
}
_OLMO3_ROPE = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
_PHI = {"phi-4": (40, 5120, 17920, 40, 10, 100352, False, 16384)}
# With the dense first layers, norms of queries and keys, and the scale of the experts' weights.
_GLM = {
    "GLM-4.5-Air": (
        (46, 4096, 10944, 96, 8, 151552, False, 131072),
        (8, 128, 1408),
        (1, False, 1.0),
    ),
    "GLM-4.5": (
        (92, 5120, 12288, 96, 8, 151552, False, 131072),
        (8, 160, 1536),
        (3, True, 2.5),
    ),
}
# With experts per token, all experts, and the width of one.
_DEEPSEEK = {"DeepSeek-V3": ((61, 7168, 18432, 128, 128, 129280, False, 163840), (8, 256, 2048))}
_DEEPSEEK_ROPE = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Text models, with heads of linear attention: of keys, and of values. An MoE has no dense layers.
_QWEN3_5 = {
    "Qwen3.5-9B": ((32, 4096, 12288, 16, 4, 248320, False, 262144), (16, 32)),
    "Qwen3.5-27B": ((64, 5120, 17408, 24, 4, 248320, False, 262144), (16, 48)),
}
_QWEN3_5_MOE = {
    "Qwen3.5-35B-A3B": ((40, 2048, 512, 16, 2, 248320, False, 262144), (16, 32), (8, 256, 512)),
}
_QWEN3_NEXT = {
    "Qwen3-Next-80B-A3B-Instruct": (
        (48, 2048, 5120, 16, 2, 151936, False, 262144),
        (16, 32),
        (10, 512, 512),
    ),
}
# By prefix of the name.
_ORGANIZATIONS = {
    "qwen": "Qwen",
    "deepseek": "deepseek-ai",
    "llama": "meta-llama",
    "mistral": "mistralai",
    "olmo": "allenai",
    "phi": "microsoft",
    "glm": "zai-org",
}
_ORDER = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
)


def _config(architecture: str, sizes: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **dict(zip(_ORDER, sizes, strict=True)), **more}


def _experts(sizes: tuple[int, int, int], key: str = "num_experts") -> dict[str, Any]:
    per_token, experts, width = sizes
    return {"num_experts_per_tok": per_token, key: experts, "moe_intermediate_size": width}


def _glm(sizes: tuple[Any, ...], experts: tuple[int, int, int], more: tuple[Any, ...]) -> Any:
    names = ("first_k_dense_replace", "use_qk_norm", "routed_scaling_factor")
    return _config(
        "Glm4MoeForCausalLM",
        sizes,
        head_dim=128,
        attention_bias=True,
        n_shared_experts=1,
        **_experts(experts, "n_routed_experts"),
        **dict(zip(names, more, strict=True)),
    )


def _hybrid(
    architecture: str,
    sizes: tuple[Any, ...],
    heads: tuple[int, int],
    experts: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    moe: dict[str, Any] = {}
    if experts is not None:
        moe = {**_experts(experts), "shared_expert_intermediate_size": experts[2]}
    return _config(
        architecture,
        sizes,
        head_dim=256,
        linear_num_key_heads=heads[0],
        linear_num_value_heads=heads[1],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_theta": 10000000, "partial_rotary_factor": 0.25},
        **moe,
    )


def _deepseek(sizes: tuple[Any, ...], experts: tuple[int, int, int]) -> dict[str, Any]:
    return _config(
        "DeepseekV3ForCausalLM",
        sizes,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_shared_experts=1,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_theta=10000,
        rope_scaling=_DEEPSEEK_ROPE,
        **_experts(experts, "n_routed_experts"),
    )


KNOWN: dict[str, dict[str, Any]] = {
    **{name: _config("Qwen2ForCausalLM", sizes) for name, sizes in _QWEN2.items()},
    **{name: _config("Qwen3ForCausalLM", sizes, head_dim=128) for name, sizes in _QWEN3.items()},
    **{
        name: _config("Qwen3MoeForCausalLM", sizes, head_dim=128, **_experts(experts))
        for name, (sizes, experts) in _QWEN3_MOE.items()
    },
    **{name: _config("LlamaForCausalLM", sizes) for name, sizes in _LLAMA.items()},
    **{
        name: _config("MistralForCausalLM", sizes, head_dim=128, sliding_window=None)
        for name, sizes in _MISTRAL.items()
    },
    **{name: _config("Olmo2ForCausalLM", sizes) for name, sizes in _OLMO2.items()},
    **{
        name: _config("Olmo3ForCausalLM", sizes, sliding_window=4096, rope_scaling=_OLMO3_ROPE)
        for name, sizes in _OLMO3.items()
    },
    **{name: _config("Phi3ForCausalLM", sizes) for name, sizes in _PHI.items()},
    **{name: _glm(*sizes) for name, sizes in _GLM.items()},
    **{name: _deepseek(*sizes) for name, sizes in _DEEPSEEK.items()},
    **{name: _hybrid("Qwen3_5ForCausalLM", *sizes) for name, sizes in _QWEN3_5.items()},
    **{name: _hybrid("Qwen3_5MoeForCausalLM", *sizes) for name, sizes in _QWEN3_5_MOE.items()},
    **{name: _hybrid("Qwen3NextForCausalLM", *sizes) for name, sizes in _QWEN3_NEXT.items()},
}

# Other versions of a known model: the model, and their positions.
_INSTRUCT_2507 = ("Qwen3-4B", "Qwen3-30B-A3B", "Qwen3-235B-A22B")
VERSIONS: dict[str, tuple[str, int]] = {
    **{f"{name}-Instruct": (name, 32768) for name in _QWEN2 if name.startswith("Qwen2.5")},
    **{
        f"Qwen2.5-Math-{size}{suffix}": (f"Qwen2.5-{size}", 4096)
        for size in ("1.5B", "7B", "72B")
        for suffix in ("", "-Instruct")
    },
    **{
        f"{name}-Base": (name, 32768)
        for name in (*_QWEN3, "Qwen3-30B-A3B")
        if name != "Qwen3-32B"  # Has none.
    },
    **{
        f"{name}-{kind}-2507": (name, 262144)
        for name in _INSTRUCT_2507
        for kind in ("Instruct", "Thinking")
    },
    **{f"{name}-Instruct": (name, 131072) for name in _LLAMA},
    "Llama-3.3-70B-Instruct": ("Llama-3.1-70B", 131072),
    "QwQ-32B": ("Qwen2.5-32B", 40960),
    "QwQ-32B-Preview": ("Qwen2.5-32B", 32768),
    "DeepScaleR-1.5B-Preview": ("DeepSeek-R1-Distill-Qwen-1.5B", 131072),
    "Skywork-OR1-7B": ("DeepSeek-R1-Distill-Qwen-7B", 131072),
    "Skywork-OR1-Math-7B": ("DeepSeek-R1-Distill-Qwen-7B", 131072),
    "Skywork-OR1-32B": ("DeepSeek-R1-Distill-Qwen-32B", 131072),
    "DeepSeek-R1-Distill-Llama-8B": ("Llama-3.1-8B", 131072),
    "DeepSeek-R1-Distill-Llama-70B": ("Llama-3.1-70B", 131072),
    "Mistral-7B-Instruct-v0.3": ("Mistral-7B-v0.3", 32768),
    "Mistral-Small-24B-Instruct-2501": ("Mistral-Small-24B-Base-2501", 32768),
    **{f"{name}-Instruct": (name, 4096) for name in _OLMO2},
    **{
        f"Olmo-3-7B-{kind}": ("Olmo-3-1025-7B", 65536)
        for kind in ("Instruct", "Think", "RL-Zero-Math", "RL-Zero-Mix")
    },
    "Olmo-3-32B-Think": ("Olmo-3-1125-32B", 65536),
    **{f"Olmo-3.1-32B-{kind}": ("Olmo-3-1125-32B", 65536) for kind in ("Instruct", "Think")},
    "Phi-4-reasoning": ("phi-4", 32768),
    "Phi-4-reasoning-plus": ("phi-4", 32768),
    "Qwen3-Next-80B-A3B-Thinking": ("Qwen3-Next-80B-A3B-Instruct", 262144),
    "Qwen3.5-9B-Base": ("Qwen3.5-9B", 262144),
    "Qwen3.5-35B-A3B-Base": ("Qwen3.5-35B-A3B", 262144),
    "GLM-4.5-Base": ("GLM-4.5", 131072),
    "GLM-4.5-Air-Base": ("GLM-4.5-Air", 131072),
    "GLM-4.6": ("GLM-4.5", 202752),
    "GLM-4.7": ("GLM-4.5", 202752),
    **{
        f"DeepSeek-{name}": ("DeepSeek-V3", 163840)
        for name in ("V3-Base", "V3-0324", "V3.1-Base", "V3.1", "R1", "R1-Zero", "R1-0528")
    },
}
# Prefixes of names whose architecture is refused (``families.REFUSED``).
_REFUSED = {
    "mimo-7b": "MiMoForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "glm-4.7-flash": "Glm4MoeLiteForCausalLM",
    "gemma-3": "Gemma3ForCausalLM",
    "nvidia-nemotron-nano": "NemotronHForCausalLM",
    "nemotron-h": "NemotronHForCausalLM",
}


def published_name(name: str) -> str | None:
    """The key of ``KNOWN`` or ``VERSIONS`` that a name means; ``None`` if there is none.

    The organization and the case are ignored, and an unambiguous prefix of a name in ``KNOWN`` is
    enough. No other name is accepted: an unlisted version may have other sizes or positions. Raises
    UserError: the prefix is ambiguous, or the model is not supported by the actor.
    """
    short = name.rsplit("/", 1)[-1].lower()
    exact = {key.lower(): key for key in (*KNOWN, *VERSIONS)}
    if short in exact:
        return exact[short]
    refused = next((one for start, one in _REFUSED.items() if short.startswith(start)), None)
    if refused is not None:
        try:
            family_of(refused)
        except ModelError as error:
            raise UserError(f"{name}: {error}") from None
    begun = [key for key in KNOWN if short and key.lower().startswith(short)]
    if len(begun) > 1:
        raise UserError(f"{name}: is the beginning of {', '.join(begun)}; give one of them")
    return begun[0] if begun else None


def published_config(key: str) -> dict[str, Any]:
    """Fields of config.json with sizes, for a key of ``KNOWN`` or ``VERSIONS``."""
    if key in KNOWN:
        return KNOWN[key]
    base, positions = VERSIONS[key]
    return KNOWN[base] | {"max_position_embeddings": positions}


def published_spec(name: str) -> ModelSpec | None:
    """Sizes of a published model by its full name; ``None`` if unknown."""
    short = name.rsplit("/", 1)[-1].lower()
    key = {key.lower(): key for key in (*KNOWN, *VERSIONS)}.get(short)
    return None if key is None else model_spec(published_config(key), name)


def hub_address(name: str) -> str | None:
    """``ORGANIZATION/NAME`` of a published model on the hub; ``None`` if unknown."""
    short = name.rsplit("/", 1)[-1].lower()
    key = {key.lower(): key for key in (*KNOWN, *VERSIONS)}.get(short)
    by = next((one for start, one in _ORGANIZATIONS.items() if short.startswith(start)), None)
    return None if key is None or by is None else f"{by}/{key}"


def hub_refusal(name: str) -> str | None:
    """Why a published model is not supported as the hub has it, where its text model is; ``None``:
    it is, or the model is unknown."""
    spec = published_spec(name)
    text = "" if spec is None else spec.architecture
    return REFUSED.get(text.replace("ForCausalLM", "ForConditionalGeneration"))
